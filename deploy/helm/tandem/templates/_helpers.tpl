{{/* Names are cut early: Kubernetes and the templates add to them. */}}
{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Of what belongs to no namespace: two releases of one name in two namespaces must not meet. */}}
{{- define "tandem.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "tandem.fullname" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of an object; arguments: the root, and the component. */}}
{{- define "tandem.labels" -}}
{{- $root := index . 0 -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "tandem.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 40 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* An image of Tandem's; arguments: the root, the image's values, the default tag. */}}
{{- define "tandem.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $name := $image.repository -}}
{{- if $root.Values.image.registry -}}
{{- $name = printf "%s/%s" (trimSuffix "/" $root.Values.image.registry) $name -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default (index . 2) $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.controllerImage" -}}
{{- include "tandem.image" (list . .Values.controller.image .Chart.AppVersion) -}}
{{- end -}}

{{- define "tandem.workerImage" -}}
{{- include "tandem.image" (list . .Values.worker.image (printf "%s-%s" .Chart.AppVersion .Values.worker.accelerator)) -}}
{{- end -}}

{{- define "tandem.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Pod security "restricted"; argument: the user's number. */}}
{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int . }}
runAsGroup: {{ int . }}
fsGroup: {{ int . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* "true" where the chart brings its own PostgreSQL. */}}
{{- define "tandem.trial" -}}
{{- if and .Values.database.trial.enabled (not .Values.database.existingSecret) -}}true{{- end -}}
{{- end -}}

{{- define "tandem.databaseSecret" -}}
{{- if include "tandem.trial" . -}}
{{- include "tandem.fullname" . }}-database
{{- else -}}
{{- required "database.existingSecret: name the Secret with the database's URL, or leave database.trial.enabled true" .Values.database.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "tandem.databaseKey" -}}
{{- if include "tandem.trial" . -}}uri{{- else -}}{{ .Values.database.existingSecretKey }}{{- end -}}
{{- end -}}

{{/* Where the controller, the migrations and the references find the database's URL. */}}
{{- define "tandem.databaseVolume" -}}
name: database
secret:
  secretName: {{ include "tandem.databaseSecret" . }}
  defaultMode: 0440
  items:
    - key: {{ include "tandem.databaseKey" . }}
      path: uri
{{- end -}}

{{- define "tandem.databaseMount" -}}
name: database
mountPath: /etc/tandem/database
readOnly: true
{{- end -}}

{{- define "tandem.priorityClass" -}}
{{- if .Values.worker.priorityClass.create -}}
{{- default (printf "%s-worker" (include "tandem.clusterName" .)) .Values.worker.priorityClass.name -}}
{{- else -}}
{{- .Values.worker.priorityClass.name -}}
{{- end -}}
{{- end -}}

{{/* Annotations of what `helm test` makes; argument: the weight. */}}
{{- define "tandem.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
{{- end -}}

{{- define "tandem.crdMetadata" -}}
labels:
  {{- include "tandem.labels" (list . "crd") | nindent 2 }}
{{- if .Values.crds.keep }}
annotations:
  helm.sh/resource-policy: keep
{{- end }}
{{- end -}}
