{{/* What all objects are called by. */}}
{{- define "vitals.labels" -}}
app.kubernetes.io/name: vitals
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* What pods are selected by; the version is no part of it, or no upgrade would find them. */}}
{{- define "vitals.selector" -}}
app.kubernetes.io/name: vitals
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vitals.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* The user is that of the image; a volume is given to its group. */}}
{{- define "vitals.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # Else each start of a pod would open all files of its volume to the group.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "vitals.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
