{{/*
Differences between versions of Kubernetes, all in this file. Supported are 1.25 to 1.37. The branches for 1.20 serve
the cluster of `make test-kube`.
*/}}

{{/* Version as in "1.31", of the cluster or from the value kubeVersion. */}}
{{- define "ostraca.kubeVersion" -}}
{{- .Values.kubeVersion | default .Capabilities.KubeVersion.Version | trimPrefix "v" -}}
{{- end }}

{{/* "true" if the version is at least the second item: (list $ "1.22"). */}}
{{- define "ostraca.isAtLeast" -}}
{{- if semverCompare (printf ">=%s-0" (index . 1)) (include "ostraca.kubeVersion" (index . 0)) }}true{{ end -}}
{{- end }}

{{- define "ostraca.pdbVersion" -}}
{{- ternary "policy/v1" "policy/v1beta1" (eq (include "ostraca.isAtLeast" (list . "1.21")) "true") -}}
{{- end }}
