"""PairRun: the Kubernetes object that asks for a run on a pair (tandem.dev/v1alpha1). Pure."""
