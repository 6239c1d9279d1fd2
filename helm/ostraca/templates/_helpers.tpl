{{- define "ostraca.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that select pods of a component: (list $ "agent"). */}}
{{- define "ostraca.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* All labels of an object of a component. */}}
{{- define "ostraca.labels" -}}
{{- $root := index . 0 -}}
{{ include "ostraca.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ostraca
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Metadata of an object: (list $ "agent" "suffix of the name"). */}}
{{- define "ostraca.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "ostraca.fullname" $root }}-{{ index . 2 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "ostraca.labels" (list $root (index . 1)) | nindent 2 }}
{{- end }}

{{/* Image of a component: (list $ "agent"). */}}
{{- define "ostraca.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- $name := printf "%s-%s" $image.repository (index . 1) -}}
{{- $digest := get $image.digests (index . 1) -}}
{{- if $digest }}{{ $name }}@{{ $digest }}{{ else }}{{ $name }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* Image of a component with its pull policy, as fields of a container. */}}
{{- define "ostraca.imageFields" -}}
image: {{ include "ostraca.image" . | quote }}
imagePullPolicy: {{ (index . 0).Values.image.pullPolicy }}
{{- end }}

{{/* Address families of a Service, as fields of its specification. */}}
{{- define "ostraca.ipFamilies" -}}
{{- with .Values.service.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.service.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Name of a Service within the cluster: (list $ "admin"). */}}
{{- define "ostraca.host" -}}
{{- $root := index . 0 -}}
{{ include "ostraca.fullname" $root }}-{{ index . 1 }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}
{{- end }}

{{- define "ostraca.fabricSecret" -}}
{{- .Values.secrets.existingSecret | default (printf "%s-fabric" (include "ostraca.fullname" .)) -}}
{{- end }}

{{- define "ostraca.workerSecret" -}}
{{- .Values.secrets.existingWorkerSecret | default (printf "%s-worker" (include "ostraca.fullname" .)) -}}
{{- end }}

{{- define "ostraca.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "ostraca.fullname" .)) -}}
{{- end }}

{{/* Fields common to all pods: (dict "root" $ "values" component "user" uid). */}}
{{- define "ostraca.podFields" -}}
{{- $root := .root -}}
# Links would add variables such as OSTRACA_AGENT_PORT, which the daemons refuse as unknown settings.
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  runAsNonRoot: {{ ne (int .user) 0 }}
  seccompProfile:
    {{- with .seccompLocalhostProfile }}
    type: Localhost
    localhostProfile: {{ . }}
    {{- else }}
    type: RuntimeDefault
    {{- end }}
{{- end }}

{{/* Security context of a container of PodSecurity "restricted". */}}
{{- define "ostraca.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Init container that gives a folder of the node to the daemon's user:
     (dict "root" $ "component" "agent" "user" uid "volume" "socket" "path" "/run/ostraca"). */}}
{{- define "ostraca.prepare" -}}
- name: prepare
  {{- include "ostraca.imageFields" (list .root .component) | nindent 2 }}
  command: [chown, "{{ .user }}:{{ .user }}", {{ .path }}]
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [CHOWN]
  resources:
    requests: {cpu: {{ .cpu | default "10m" | quote }}, memory: {{ .memory | default "32Mi" }}}
    limits: {cpu: {{ .cpu | default "100m" | quote }}, memory: {{ .memory | default "64Mi" }}}
  volumeMounts:
    - {name: {{ .volume }}, mountPath: {{ .path }}}
{{- end }}

{{/* Size in MiB of a quantity in Mi, Gi or Ti. */}}
{{- define "ostraca.mib" -}}
{{- if not (regexMatch "^[1-9][0-9]*(Mi|Gi|Ti)$" .) -}}
{{- fail (printf "the size %q is invalid: write a whole number with Mi, Gi or Ti, as in 4Gi" .) -}}
{{- end -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- $unit := regexFind "[A-Za-z]+$" . -}}
{{- mul $number (get (dict "Mi" 1 "Gi" 1024 "Ti" 1048576) $unit | int64) -}}
{{- end }}

{{/* Folder of the agent's socket on the node; the path of a socket has 107 bytes at most. */}}
{{- define "ostraca.socketFolder" -}}
{{- .Values.agent.socket.hostPath | default (printf "/run/ostraca/%s/%s" .Release.Namespace .Release.Name) -}}
{{- end }}

{{/* Folder of the drives that are files on the node. */}}
{{- define "ostraca.drivesFolder" -}}
{{- .Values.enclosure.files.hostPath | default (printf "/var/lib/ostraca/%s/%s" .Release.Namespace .Release.Name) -}}
{{- end }}
