{{- define "tessera.weightsMount" -}}
{{- $weights := .Values.model.weights -}}
{{- if ne $weights.source "image" }}
- name: weights
  mountPath: /models
  readOnly: true
  {{- if and (eq $weights.source "pvc") $weights.pvc.subPath }}
  subPath: {{ $weights.pvc.subPath | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Gateways need the tokenizer alone, which a .gguf file has in itself. Of (dict "root" $ "role" ROLE). */}}
{{- define "tessera.weightsSize" -}}
{{- $init := .root.Values.model.weights.init -}}
{{- $gateway := default (ternary $init.size "1Gi" (hasSuffix ".gguf" .root.Values.model.name)) $init.gatewaySize -}}
{{- ternary $gateway $init.size (eq .role "gateway") | include "tessera.number" -}}
{{- end }}

{{/* Of (dict "root" $ "role" ROLE). */}}
{{- define "tessera.weightsVolume" -}}
{{- $weights := .root.Values.model.weights -}}
{{- if eq $weights.source "pvc" }}
- name: weights
  persistentVolumeClaim: {claimName: {{ $weights.pvc.claimName | quote }}, readOnly: true}
{{- else if and (eq $weights.source "init") $weights.init.storageClass }}
- name: weights
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ $weights.init.storageClass | quote }}
        resources: {requests: {storage: {{ include "tessera.weightsSize" . | quote }}}}
{{- else if eq $weights.source "init" }}
- name: weights
  emptyDir: {sizeLimit: {{ include "tessera.weightsSize" . | quote }}}
{{- end }}
{{- end }}

{{/* Of (dict "root" $ "role" ROLE). */}}
{{- define "tessera.weightsInit" -}}
{{- if eq .root.Values.model.weights.source "init" }}
{{- with .root.Values.model.weights.init }}
- name: weights
  image: {{ .image | quote }}
  imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
  {{- with .command }}
  command:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .args }}
  args:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    - {name: ROLE, value: {{ $.role }}}
    - {name: TARGET, value: /models}
    {{- include "tessera.env" (dict "env" .env) | nindent 4 }}
  {{- with .envFromSecret }}
  envFrom:
    - secretRef: {name: {{ . | quote }}}
  {{- end }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  securityContext:
    {{- include "tessera.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: weights, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
{{- end }}
