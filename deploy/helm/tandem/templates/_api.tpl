{{- define "tandem.apiImage" -}}
{{- include "tandem.image" (list . .Values.api.image .Chart.AppVersion) -}}
{{- end -}}

{{/* The API's ConfigMap's data (tandem_api.settings, tandem.pairing.policy); its Deployment takes their checksum. */}}
{{- define "tandem.apiConfiguration" -}}
settings.yaml: |
  {{- toYaml (merge (dict "namespace" .Release.Namespace) .Values.api.settings) | nindent 2 }}
policy.yaml: |
  {{- toYaml .Values.policy | nindent 2 }}
{{- end -}}

{{/* Where the API finds the database's URL: its own role's, or that of all others. */}}
{{- define "tandem.apiDatabaseVolume" -}}
{{- with .Values.api.database.existingSecret -}}
name: database
secret:
  secretName: {{ . }}
  defaultMode: 0440
  items:
    - key: {{ $.Values.api.database.existingSecretKey }}
      path: uri
{{- else -}}
{{- include "tandem.databaseVolume" . -}}
{{- end -}}
{{- end -}}
