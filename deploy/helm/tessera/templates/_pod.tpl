{{/* What the pods of every role have around their containers, of (dict "root" $ "role" ROLE "pod" ITS VALUES). */}}
{{- define "tessera.podFrame" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ include "tessera.serviceAccount" .root | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 $values.security.runAsUser }}
  runAsGroup: {{ int64 $values.security.runAsGroup }}
  fsGroup: {{ int64 $values.security.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  {{- with .pod.supplementalGroups }}
  supplementalGroups:
    {{- range . }}
    - {{ int64 . }}
    {{- end }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.topologySpread.enabled }}
topologySpreadConstraints:
  {{- range $values.topologySpread.topologyKeys }}
  - maxSkew: 1
    topologyKey: {{ . | quote }}
    whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "tessera.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Labels and annotations of a role's pods, of the same. Nothing of the chart's own version: a new one of it alone restarts nobody. */}}
{{- define "tessera.podMetadata" -}}
labels:
  {{- merge (include "tessera.selector" . | fromYaml) .pod.labels | toYaml | nindent 2 }}
{{- with .pod.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tessera.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The environment of every container, of (dict "env" LIST "home" FOLDER). */}}
{{- define "tessera.env" -}}
- {name: HOME, value: {{ default "/tmp" .home }}}
{{- range .env }}
- name: {{ .name | quote }}
  value: {{ .value | quote }}
{{- end }}
{{- end }}

{{/* Health is asked in plain text on a port of its own, since the kubelet's probes can do no TLS. Of (dict "service" NAME). */}}
{{- define "tessera.grpcProbe" -}}
grpc:
  port: 50059
  {{- with .service }}
  service: {{ . }}
  {{- end }}
timeoutSeconds: 5
{{- end }}

{{/* The process answers; it does also while a takeover or a load goes on. */}}
{{- define "tessera.liveness" -}}
{{ include "tessera.grpcProbe" dict }}
periodSeconds: 10
failureThreshold: 6
{{- end }}

{{/* Ports of a role's container, of (dict "root" $ "port" NUMBER). */}}
{{- define "tessera.ports" -}}
- {name: grpc, containerPort: {{ .port }}}
- {name: health, containerPort: 50059}
{{- if .root.Values.metrics.enabled }}
- {name: metrics, containerPort: 9100}
{{- end }}
{{- end }}

{{/* Certificates and tokens, of (dict "root" $ "role" ROLE). */}}
{{- define "tessera.accessMounts" -}}
{{- $values := .root.Values -}}
- {name: tmp, mountPath: /tmp}
{{- if $values.tls.enabled }}
- {name: tls, mountPath: /etc/tessera/tls, readOnly: true}
{{- end }}
{{- if $values.auth.internal.enabled }}
- {name: internal, mountPath: /etc/tessera/internal, readOnly: true}
{{- end }}
{{- end }}

{{- define "tessera.accessVolumes" -}}
{{- $values := .root.Values -}}
- name: tmp
  emptyDir: {}
{{- if $values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ ternary (default $values.tls.existingSecret $values.tls.gatewaySecret) $values.tls.existingSecret (eq .role "gateway") | quote }}
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- if $values.auth.internal.enabled }}
- name: internal
  secret:
    secretName: {{ $values.auth.internal.existingSecret | quote }}
    items:
      {{- if ne .role "gateway" }}
      - {key: {{ $values.auth.internal.key | quote }}, path: tokens}
      {{- end }}
      {{- if ne .role "worker" }}
      - {key: {{ $values.auth.internal.tokenKey | quote }}, path: token}
      {{- end }}
{{- end }}
{{- end }}
