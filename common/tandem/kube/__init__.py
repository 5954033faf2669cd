"""The cluster: a thin client on plain dicts, an informer, and the lease of the one active replica.

``kubernetes`` is imported by `tandem.kube.config` and `tandem.kube.client` alone, and only when a client is made.
"""
