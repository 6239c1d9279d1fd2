{{/* Combinations of values that can't work, each with the remedy. One failure names all. */}}
{{- define "ostraca.problems" -}}
{{- $values := .Values -}}
{{- $problems := list -}}
{{- if not (regexMatch "^[a-z]" (include "ostraca.fullname" .)) -}}
{{- $problems = append $problems (printf "names of Services begin with a letter, and the release is named %s: set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{- range $label, $_ := $values.commonLabels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (eq $label "helm.sh/chart") -}}
{{- $problems = append $problems (printf "commonLabels.%s is a label of the chart: remove it" $label) -}}
{{- end -}}
{{- end -}}
{{- range $daemon := list "agent" "enclosure" -}}
{{- if eq 1 ((get $values $daemon).ports | values | uniq | len) -}}
{{- $problems = append $problems (printf "both of %s.ports are the same: choose another for one" $daemon) -}}
{{- end -}}
{{- end -}}
{{- if and $values.etcd.trial.enabled $values.etcd.endpoints -}}
{{- $problems = append $problems "etcd.trial.enabled and etcd.endpoints exclude each other: remove one" -}}
{{- end -}}
{{- if not (or $values.etcd.trial.enabled $values.etcd.endpoints) -}}
{{- $problems = append $problems "no etcd: list host:port of each member in etcd.endpoints, or set etcd.trial.enabled=true for a trial" -}}
{{- end -}}
{{- if and $values.etcd.trial.enabled (or $values.etcd.tls.existingSecret $values.etcd.auth.user) -}}
{{- $problems = append $problems "the trial etcd has neither TLS nor access control: remove etcd.tls and etcd.auth, or use etcd.endpoints" -}}
{{- end -}}
{{- if ne (empty $values.etcd.auth.user) (empty $values.etcd.auth.existingSecret) -}}
{{- $problems = append $problems "etcd.auth.user and etcd.auth.existingSecret go together: give both, or neither" -}}
{{- end -}}
{{- if and $values.etcd.tls.clientCertificate (not $values.etcd.tls.existingSecret) -}}
{{- $problems = append $problems "etcd.tls.clientCertificate needs etcd.tls.existingSecret" -}}
{{- end -}}
{{- if and $values.enclosure.files.enabled $values.enclosure.nvmet.enabled -}}
{{- $problems = append $problems "enclosure.files and enclosure.nvmet exclude each other: install a second release for the other kind" -}}
{{- end -}}
{{- if and $values.enclosures (not $values.admin.enabled) -}}
{{- $problems = append $problems "registration of enclosures needs the admin service: set admin.enabled=true" -}}
{{- end -}}
{{- if and $values.enclosure.files.enabled (not $values.admin.enabled) -}}
{{- $problems = append $problems "enclosure.files needs the admin service, which registers the daemons: set admin.enabled=true" -}}
{{- end -}}
{{- if and $values.agent.nvme.kernel (ne (int $values.agent.runAsUser) 0) -}}
{{- $problems = append $problems "agent.nvme.kernel needs root: set agent.runAsUser=0" -}}
{{- end -}}
{{- if and $values.enclosure.files.enabled $values.agent.nvme.kernel -}}
{{- $problems = append $problems "enclosure.files goes with the user-space initiator: set agent.nvme.kernel=false, or use enclosure.nvmet" -}}
{{- end -}}
{{- if hasKey ($values.agent.settings.memory | default dict) "huge_pages" -}}
{{- $problems = append $problems "agent.settings.memory.huge_pages is derived by the chart: set agent.hugePages instead" -}}
{{- end -}}
{{- if lt (include "ostraca.blockMib" . | int64) 128 -}}
{{- $problems = append $problems (printf "agent.memory %s less agent.overhead %s leaves less than 128Mi for blocks: raise agent.memory" $values.agent.memory $values.agent.overhead) -}}
{{- end -}}
{{- if lt (include "ostraca.mib" $values.agent.overhead | int64) 128 -}}
{{- $problems = append $problems (printf "agent.overhead is %s, and an agent needs 128Mi beside blocks: raise agent.overhead" $values.agent.overhead) -}}
{{- end -}}
{{- /* nvme_core.io_timeout is 30 s, and owner.pause_max_s 60 s of late_write_s. */ -}}
{{- $path := add 30 (mul 2 $values.agent.nvme.keep_alive_s) $values.agent.nvme.fast_io_fail_s -}}
{{- if gt (int $path) (sub (int $values.agent.late_write_s) 60 | int) -}}
{{- $problems = append $problems (printf "a write may arrive %d s late (30 s, twice agent.nvme.keep_alive_s, agent.nvme.fast_io_fail_s), and agent.late_write_s less 60 s is the limit: lower agent.nvme.fast_io_fail_s, or raise agent.late_write_s at all agents" $path) -}}
{{- end -}}
{{- if and (eq $values.agent.mode "dpu") $values.worker.enabled (not $values.worker.agents) -}}
{{- $problems = append $problems "workers of DPU hosts need addresses: list the agents in worker.agents, as in tcp://dpu-1:7400, or set worker.enabled=false" -}}
{{- end -}}
{{- if and $values.secrets.existingSecret $values.worker.enabled (not $values.secrets.existingWorkerSecret) -}}
{{- $problems = append $problems "secrets.existingSecret needs secrets.existingWorkerSecret with a worker's token, or worker.enabled=false" -}}
{{- end -}}
{{- if and $values.tls.certManager.enabled $values.tls.existingSecret -}}
{{- $problems = append $problems "tls.certManager.enabled and tls.existingSecret exclude each other: remove one" -}}
{{- end -}}
{{- if and $values.tls.certManager.enabled (not $values.tls.certManager.issuerRef.name) -}}
{{- $problems = append $problems "tls.certManager.enabled needs tls.certManager.issuerRef.name" -}}
{{- end -}}
{{- if and $values.admin.ingress.enabled (not $values.admin.ingress.host) -}}
{{- $problems = append $problems "admin.ingress.enabled needs admin.ingress.host" -}}
{{- end -}}
{{- if and (gt (len $values.service.ipFamilies) 1) (not (hasSuffix "DualStack" $values.service.ipFamilyPolicy)) -}}
{{- $problems = append $problems "service.ipFamilies names two families: set service.ipFamilyPolicy to PreferDualStack or RequireDualStack" -}}
{{- end -}}
{{- if and $values.monitoring.podMonitor.enabled $values.networkPolicy.enabled (not $values.networkPolicy.scrapers) -}}
{{- $problems = append $problems "networkPolicy closes the pages to Prometheus, so every daemon would count as down: list Prometheus' pods in networkPolicy.scrapers" -}}
{{- end -}}
{{- range $daemon, $names := dict "agent" (list "id" "advertise") "enclosure" (list "id" "listen") -}}
{{- range $name := $names -}}
{{- if hasKey (get $values $daemon).settings $name -}}
{{- $problems = append $problems (printf "%s.settings.%s has no effect, since a variable of the pod sets it: remove it" $daemon $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $daemon, $derived := dict "agent" (include "ostraca.agentSettings" .) "enclosure" (include "ostraca.enclosureSettings" .) "admin" (include "ostraca.adminSettings" .) -}}
{{- range $name := include "ostraca.overlap" (list "" ($derived | fromJson) (get $values $daemon).settings) | splitList "," | compact -}}
{{- if not (hasPrefix "memory." $name) -}}
{{- $problems = append $problems (printf "%s.settings.%s is derived by the chart: set the value of that purpose instead" $daemon $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $problems }}
{{- end }}

{{/* Names in both of two nested maps, separated by commas: (list "prefix" map map). */}}
{{- define "ostraca.overlap" -}}
{{- $prefix := index . 0 -}}
{{- $first := index . 1 -}}
{{- range $key, $value := index . 2 -}}
{{- if hasKey $first $key -}}
{{- if kindIs "map" $value -}}
{{ include "ostraca.overlap" (list (printf "%s%s." $prefix $key) (get $first $key) $value) }}
{{- else -}}
{{ $prefix }}{{ $key }},
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
