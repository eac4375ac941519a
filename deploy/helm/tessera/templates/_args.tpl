{{/* A number as the command line reads it: Helm holds all of them as floats. */}}
{{- define "tessera.number" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end }}

{{/* `options` of a role as arguments. */}}
{{- define "tessera.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $name }}
{{- else if kindIs "slice" $value }}
{{- range $item := $value }}
- {{ printf "--%s=%s" $name (include "tessera.number" $item) | quote }}
{{- end }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $name (include "tessera.number" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* What every role is told, of (dict "root" $ "role" ROLE). */}}
{{- define "tessera.commonArgs" -}}
{{- $values := .root.Values -}}
- --health-listen={{ $values.listenHost }}:50059
{{- if $values.metrics.enabled }}
- --metrics-listen={{ $values.listenHost }}:9100
{{- end }}
{{- if $values.tracing.otlpEndpoint }}
- --otlp-endpoint={{ $values.tracing.otlpEndpoint }}
{{- end }}
{{- if $values.tls.enabled }}
- --tls-cert=/etc/tessera/tls/tls.crt
- --tls-key=/etc/tessera/tls/tls.key
- --tls-ca=/etc/tessera/tls/ca.crt
- --tls-peer-name={{ $values.tls.peerName }}
{{- end }}
{{- if and $values.auth.internal.enabled (ne .role "gateway") }}
- --tokens=/etc/tessera/internal/tokens
{{- end }}
{{- if and $values.auth.internal.enabled (ne .role "worker") }}
- --token-file=/etc/tessera/internal/token
{{- end }}
{{- end }}

{{/* A quantity of Kubernetes (500m, 1.5Gi, 2) as a number, to compare. */}}
{{- define "tessera.amount" -}}
{{- $of := dict "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $of = merge $of (dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0) -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[a-zA-Z]+$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (get $of $unit | default 1.0) | printf "%.9f" -}}
{{- end }}

{{/* Threads of each process of a CPU worker: the cores of its limit, where it has one. A process sees all cores of its node. */}}
{{- define "tessera.threads" -}}
{{- $limits := default dict .Values.worker.pod.resources.limits -}}
{{- if and (eq .Values.worker.variant "cpu") $limits.cpu (not (hasKey .Values.worker.options "threads")) -}}
{{- $cores := include "tessera.amount" $limits.cpu | float64 -}}
{{- min 1024 (max 1 (div (int64 $cores) (int64 .Values.worker.tensorParallelSize))) -}}
{{- end -}}
{{- end }}

{{/* Where the journal is. */}}
{{- define "tessera.redisUrl" -}}
{{- if eq .Values.redis.mode "inChart" -}}
redis://{{ include "tessera.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- else -}}
{{- $external := .Values.redis.external -}}
{{- $files := list -}}
{{- if $external.caSecret }}{{ $files = append $files "ssl_ca_certs=/etc/tessera/redis-ca/ca.crt" }}{{ end -}}
{{- if $external.clientCertSecret }}
{{- $files = concat $files (list "ssl_certfile=/etc/tessera/redis-cert/tls.crt" "ssl_keyfile=/etc/tessera/redis-cert/tls.key") -}}
{{- end -}}
{{ $external.url }}{{ if $files }}?{{ join "&" $files }}{{ end }}
{{- end -}}
{{- end }}
