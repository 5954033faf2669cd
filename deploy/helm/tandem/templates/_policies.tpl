{{/* Peers of a NetworkPolicy that answer for names. */}}
{{- define "tandem.dnsPeers" -}}
{{- range .Values.worker.dns }}
{{- if .cidr }}
- ipBlock:
    cidr: {{ .cidr }}
{{- else }}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ .namespace }}
  podSelector:
    matchLabels:
      {{- toYaml .labels | nindent 6 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where a service may go: names, the API server, PostgreSQL. Of the root and the service's own `networkPolicy`. */}}
{{- define "tandem.egress" -}}
{{- $policy := index . 1 }}
{{- with index . 0 }}
{{- with include "tandem.dnsPeers" . }}
# Names.
- ports:
    - protocol: UDP
      port: 53
    - protocol: TCP
      port: 53
  to:
    {{- . | nindent 4 }}
{{- end }}
# The API server. It is no pod, and most policies see its own address, not the Service's.
- ports:
    {{- range $policy.kubernetes.ports }}
    - protocol: TCP
      port: {{ int . }}
    {{- end }}
  {{- with $policy.kubernetes.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
# PostgreSQL.
{{- if include "tandem.trial" . }}
- ports:
    - protocol: TCP
      port: 5432
  to:
    - podSelector:
        matchLabels:
          {{- include "tandem.selector" (list . "postgres") | nindent 10 }}
{{- else }}
- ports:
    {{- range $policy.database.ports }}
    - protocol: TCP
      port: {{ int . }}
    {{- end }}
  {{- with $policy.database.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}
