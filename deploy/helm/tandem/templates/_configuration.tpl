{{/* The ConfigMap's data; the Deployment takes their checksum, so that a change starts new pods. */}}
{{- define "tandem.configuration" -}}
settings.yaml: |
  namespace: {{ .Release.Namespace | quote }}
  markNodes: {{ .Values.controller.markNodes }}
  workers: {{ int .Values.controller.workers }}
  resyncSeconds: {{ int .Values.controller.resyncSeconds }}
  factsSeconds: {{ .Values.controller.factsSeconds }}
  progressSeconds: {{ int .Values.controller.progressSeconds }}
  pairingSeconds: {{ int .Values.controller.pairingSeconds }}
  leaseSeconds: {{ int .Values.controller.leaseSeconds }}
  database:
    name: {{ include "tandem.databaseSecret" . | quote }}
    key: {{ include "tandem.databaseKey" . | quote }}
  worker:
    image: {{ include "tandem.workerImage" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    imagePullSecrets: {{ toJson .Values.image.pullSecrets }}
    serviceAccount: {{ include "tandem.fullname" . }}-worker
    {{- with include "tandem.priorityClass" . }}
    priorityClass: {{ . | quote }}
    {{- end }}
    runAsUser: {{ int .Values.worker.runAsUser }}
    terminationGraceSeconds: {{ int .Values.worker.terminationGraceSeconds }}
    recordsTimeoutSeconds: {{ int .Values.worker.recordsTimeoutSeconds }}
    metrics:
      enabled: {{ .Values.metrics.worker.enabled }}
      from: {{ toJson .Values.metrics.worker.from }}
      annotations: {{ .Values.metrics.podAnnotations }}
    allowedHostPaths: {{ toJson .Values.worker.allowedHostPaths }}
    dns:
      {{- range .Values.worker.dns }}
      {{- /* What is left out has a default in the settings: a block must say that it means no pods. */}}
      {{- if .cidr }}
      - {namespace: null, labels: {}, cidr: {{ .cidr | quote }}}
      {{- else }}
      - {{ toJson . }}
      {{- end }}
      {{- else }}
      []
      {{- end }}
policy.yaml: |
  {{- toYaml .Values.policy | nindent 2 }}
{{- end -}}
