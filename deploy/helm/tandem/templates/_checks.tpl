{{/* Values that a template would take and a cluster could not: each is one line with the cause and the mend. */}}
{{- define "tandem.checks" -}}
{{- $host := `[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?` -}}
{{- $part := `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*` -}}
{{- $path := printf `%s(/%s)*` $part $part -}}
{{- with .Values.image.registry -}}
{{- if not (regexMatch (printf `^%s(/%s)?/?$` $host $path) .) -}}
{{- fail (printf "image.registry %q: give a host and a path such as registry.example.com/team, without https://" .) -}}
{{- end -}}
{{- end -}}
{{- $images := dict "controller.image.repository" .Values.controller.image.repository "api.image.repository" .Values.api.image.repository "worker.image.repository" .Values.worker.image.repository -}}
{{- range $name, $value := $images -}}
{{- if not (regexMatch (printf `^(%s/)?%s$` $host $path) $value) -}}
{{- fail (printf "%s %q: give a name such as registry.example.com/team/tandem in small letters, without https:// and without a tag" $name $value) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch (printf `^(%s/)?%s(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?(@sha256:[0-9a-f]{64})?$` $host $path) .Values.database.trial.image) -}}
{{- fail (printf "database.trial.image %q: give an image such as registry.example.com/postgres:18, without https://" .Values.database.trial.image) -}}
{{- end -}}
{{- with .Values.fullnameOverride -}}
{{- if not (regexMatch `^[a-z]([-a-z0-9]*[a-z0-9])?$` .) -}}
{{- fail (printf "fullnameOverride %q: use small letters, digits and dashes, a letter first and no dash last" .) -}}
{{- end -}}
{{- end -}}
{{- with .Values.nameOverride -}}
{{- if not (regexMatch `^[a-z0-9]([-a-z0-9]*[a-z0-9])?$` .) -}}
{{- fail (printf "nameOverride %q: use small letters, digits and dashes, no dash first or last" .) -}}
{{- end -}}
{{- end -}}
{{- range .Values.worker.allowedHostPaths -}}
{{- if not (regexMatch `^(/+([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+))+/*$` .) -}}
{{- fail (printf "worker.allowedHostPaths %q: name a folder below /, without . or ..: the whole disk is never allowed" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
