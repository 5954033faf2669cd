{{- define "tandem.migrationsPod" -}}
metadata:
  labels:
    {{- include "tandem.labels" (list . "migrations") | nindent 4 }}
spec:
  restartPolicy: OnFailure
  # No account of its own: a hook runs before the chart's accounts exist, and this one gets no token anyway.
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "tandem.pullSecrets" . | nindent 2 }}
  {{- with .Values.controller.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.controller.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "tandem.podSecurity" 65532 | nindent 4 }}
  containers:
    - name: migrate
      image: {{ include "tandem.controllerImage" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [db, upgrade, --db-file, /etc/tandem/database/uri]
      resources:
        {{- toYaml .Values.migrations.resources | nindent 8 }}
      securityContext:
        {{- include "tandem.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {{- include "tandem.databaseMount" . | nindent 10 }}
        - name: tmp
          mountPath: /tmp
  volumes:
    - {{- include "tandem.databaseVolume" . | nindent 6 }}
    - name: tmp
      emptyDir: {}
{{- end -}}
