{{/* A release may be called what no Service can be: with dots, from a digit on, or too long for what follows. A name made to fit ends in a
     hash of the wanted one, since two may fit alike. */}}
{{- define "tessera.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $wanted := default $full .Values.fullnameOverride -}}
{{- $fit := replace "." "-" $wanted -}}
{{- $fit = ternary (printf "r-%s" $fit) $fit (regexMatch "^[0-9]" $fit) -}}
{{- if or (ne $fit $wanted) (gt (len $fit) 40) -}}
{{- $fit = printf "%s-%s" ($fit | trunc 31 | trimSuffix "-") (sha256sum $wanted | trunc 8) -}}
{{- end -}}
{{- $fit -}}
{{- end }}

{{- define "tessera.serviceAccount" -}}
{{- default (ternary (include "tessera.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}

{{/* By default with the namespace, which has no dots: releases of one name in two namespaces may share a Redis. */}}
{{- define "tessera.group" -}}
{{- default (printf "%s.%s" .Release.Namespace (include "tessera.fullname" .)) .Values.group -}}
{{- end }}

{{/* Of (dict "root" $ "role" ROLE). */}}
{{- define "tessera.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{/* Of (dict "root" $ "role" ROLE). */}}
{{- define "tessera.labels" -}}
{{ include "tessera.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{/* Name and labels of an object, of (dict "root" $ "role" ROLE "name" SUFFIX). */}}
{{- define "tessera.metadata" -}}
name: {{ include "tessera.fullname" .root }}-{{ default .role .name }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "tessera.labels" . | nindent 2 }}
{{- end }}

{{/* Of (dict "root" $ "image" ONE OF .Values.image). */}}
{{- define "tessera.image" -}}
{{- $values := .root.Values.image -}}
{{- $place := ternary .image.repository (printf "%s/%s" (trimSuffix "/" $values.registry) .image.repository) (empty $values.registry) -}}
{{- if .image.digest -}}
{{ $place }}@{{ .image.digest }}
{{- else -}}
{{ $place }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}
{{- end }}

{{/* What tells an image from others of its repository, as a folder's name; of the same. */}}
{{- define "tessera.imageVersion" -}}
{{- if .image.digest }}{{ trimPrefix "sha256:" .image.digest }}{{ else }}{{ default .root.Chart.AppVersion .image.tag }}{{ end -}}
{{- end }}

{{/* HOST:PORT of all pods of a role, of (dict "root" $ "role" ROLE "port" PORT): their headless Service has a record for each. */}}
{{- define "tessera.all" -}}
dns:///{{ include "tessera.fullname" .root }}-{{ .role }}.{{ .root.Release.Namespace }}.svc:{{ .port }}
{{- end }}

{{- define "tessera.workerDrainSeconds" -}}
{{- ternary .Values.drain.longestGenerationSeconds .Values.worker.drainSeconds (kindIs "invalid" .Values.worker.drainSeconds) | int64 -}}
{{- end }}

{{/* Least number of seconds between the end's beginning and its force. */}}
{{- define "tessera.gatewayGraceMin" -}}
{{- add (int64 .Values.drain.preStopSeconds) (int64 .Values.drain.longestGenerationSeconds) 15 -}}
{{- end }}

{{- define "tessera.workerGraceMin" -}}
{{- add (int64 (include "tessera.workerDrainSeconds" .)) 30 -}}
{{- end }}

{{/* What Prometheus calls the pods of a role, of (dict "root" $ "role" ROLE): alerts and dashboard look for jobs with `tessera` in their names. */}}
{{- define "tessera.job" -}}
{{- $name := include "tessera.fullname" .root -}}
{{ ternary $name (printf "tessera-%s" $name) (contains "tessera" $name) }}-{{ .role }}
{{- end }}
