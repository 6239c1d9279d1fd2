{{/* Settings of the daemons, as TOML. */}}

{{/* A TOML value. JSON's strings are TOML's; whole numbers lose the fraction of Helm's floats. */}}
{{- define "ostraca.tomlValue" -}}
{{- if kindIs "slice" . -}}
[{{ range $i, $item := . }}{{ if $i }}, {{ end }}{{ include "ostraca.tomlValue" $item }}{{ end }}]
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{ printf "%.0f" . }}
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{/* A table with its tables: (list "name or empty" map). */}}
{{- define "ostraca.toml" -}}
{{- $name := index . 0 -}}
{{- range $key, $value := index . 1 }}
{{- if not (kindIs "map" $value) }}
{{ $key }} = {{ include "ostraca.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $key, $value := index . 1 }}
{{- if kindIs "map" $value }}
{{- $inner := ternary $key (printf "%s.%s" $name $key) (eq $name "") }}

[{{ $inner }}]
{{- include "ostraca.toml" (list $inner $value) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "ostraca.etcdPrefix" -}}
{{- .Values.etcd.prefix | default (printf "/ostraca/%s/%s/" .Release.Namespace .Release.Name) -}}
{{- end }}

{{/* Addresses of etcd, as JSON. */}}
{{- define "ostraca.etcdEndpoints" -}}
{{- if .Values.etcd.trial.enabled -}}
{{- $name := printf "%s-etcd" (include "ostraca.fullname" .) -}}
{{- $endpoints := list -}}
{{- range $i := until (int .Values.etcd.trial.replicas) -}}
{{- $endpoints = append $endpoints (printf "%s-%d.%s:2379" $name $i (include "ostraca.host" (list $ "etcd"))) -}}
{{- end -}}
{{ toJson $endpoints }}
{{- else -}}
{{ toJson .Values.etcd.endpoints }}
{{- end -}}
{{- end }}

{{/* Group `etcd` of a daemon's settings, as JSON. */}}
{{- define "ostraca.etcdSettings" -}}
{{- $etcd := dict "endpoints" (include "ostraca.etcdEndpoints" . | fromJsonArray) "prefix" (include "ostraca.etcdPrefix" .)
      "lease_ttl_s" .Values.etcd.lease_ttl_s "awaits_fabric" true -}}
{{- if .Values.etcd.tls.existingSecret -}}
{{- $_ := set $etcd "ca" "/etc/ostraca/etcd-tls/ca.crt" -}}
{{- if .Values.etcd.tls.clientCertificate -}}
{{- $_ := set $etcd "cert" "/etc/ostraca/etcd-tls/tls.crt" -}}
{{- $_ := set $etcd "key" "/etc/ostraca/etcd-tls/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if .Values.etcd.auth.user -}}
{{- $_ := set $etcd "user" .Values.etcd.auth.user -}}
{{- $_ := set $etcd "password_file" "/etc/ostraca/etcd-auth/password" -}}
{{- end -}}
{{ toJson $etcd }}
{{- end }}

{{/* Options of commands with a connection to etcd, as items of `args`. */}}
{{- define "ostraca.etcdOptions" -}}
{{- $etcd := include "ostraca.etcdSettings" . | fromJson -}}
- --etcd={{ join "," $etcd.endpoints }}
- --prefix={{ $etcd.prefix }}
{{- range $name, $option := dict "ca" "--etcd-ca" "cert" "--etcd-cert" "key" "--etcd-key" "user" "--etcd-user" "password_file" "--etcd-password" }}
{{- with get $etcd $name }}
- {{ $option }}={{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Mounts and volumes of files towards etcd. */}}
{{- define "ostraca.etcdMounts" -}}
{{- if .Values.etcd.tls.existingSecret }}
- {name: etcd-tls, mountPath: /etc/ostraca/etcd-tls, readOnly: true}
{{- end }}
{{- if .Values.etcd.auth.user }}
- {name: etcd-auth, mountPath: /etc/ostraca/etcd-auth, readOnly: true}
{{- end }}
{{- end }}

{{- define "ostraca.etcdVolumes" -}}
{{- with .Values.etcd.tls.existingSecret }}
- name: etcd-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if .Values.etcd.auth.user }}
- name: etcd-auth
  secret: {secretName: {{ .Values.etcd.auth.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* Volume of some files of the fabric's Secret: (list $ "fabric.key" "tokens.toml"). */}}
{{- define "ostraca.fabricVolume" -}}
- name: fabric
  secret:
    secretName: {{ include "ostraca.fabricSecret" (first .) }}
    defaultMode: 0440
    items:
      {{- range rest . }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}

{{/* Memory for blocks in MiB: whole chunks of 32 MiB. */}}
{{- define "ostraca.blockMib" -}}
{{- $memory := include "ostraca.mib" .Values.agent.memory | int64 -}}
{{- $overhead := include "ostraca.mib" .Values.agent.overhead | int64 -}}
{{- mul 32 (div (sub $memory $overhead) 32) -}}
{{- end }}

{{/* Memory of the agent's container: with reserved huge pages, the part beside blocks. */}}
{{- define "ostraca.agentMemory" -}}
{{- if .Values.agent.hugePages -}}
{{ sub (include "ostraca.mib" .Values.agent.memory | int64) (include "ostraca.blockMib" . | int64) }}Mi
{{- else -}}
{{ .Values.agent.memory }}
{{- end -}}
{{- end }}

{{- define "ostraca.agentTransports" -}}
{{- if .Values.agent.transports -}}
{{ toJson .Values.agent.transports }}
{{- else if or .Values.agent.hostPID .Values.agent.rdma.resourceName -}}
["nixl", "inline"]
{{- else -}}
["inline"]
{{- end -}}
{{- end }}

{{/* Settings that the chart derives for an agent, as JSON. */}}
{{- define "ostraca.agentSettings" -}}
{{- $agent := .Values.agent -}}
{{- $scheme := ternary "tls" "tcp" .Values.tls.agents -}}
{{- $listen := list (printf "%s://[::]:%d" $scheme (int $agent.ports.peers)) -}}
{{- if eq $agent.mode "host" -}}
{{- $listen = prepend $listen "unix:///run/ostraca/agent.sock" -}}
{{- end -}}
{{- $block := include "ostraca.blockMib" . | int64 -}}
{{- $settings := dict
      "listen" $listen
      "state_dir" "/var/lib/ostraca/agent"
      "fabric_key_file" "/etc/ostraca/fabric/fabric.key"
      "tokens_file" "/etc/ostraca/fabric/tokens.toml"
      "transports" (include "ostraca.agentTransports" . | fromJsonArray)
      "http_listen" (printf "[::]:%d" (int $agent.ports.http))
      "drain_s" $agent.drain_s
      "etcd" (include "ostraca.etcdSettings" . | fromJson)
      "memory" (dict "reserve_bytes" "64MiB" "cache_bytes" (printf "%dMiB" (sub $block 64))
                     "staging_bytes" (printf "%dMiB" (max 64 (div $block 2))))
      "owner" (dict "late_write_s" $agent.late_write_s "grant_s" .Values.etcd.lease_ttl_s)
      "nvme" (dict "fast_io_fail_s" $agent.nvme.fast_io_fail_s "reconnect_delay_s" $agent.nvme.reconnect_delay_s
                   "keep_alive_s" $agent.nvme.keep_alive_s) -}}
{{- if $agent.hugePages -}}
{{- $_ := set $settings.memory "huge_pages" true -}}
{{- end -}}
{{- if eq $agent.mode "host" -}}
{{- $_ := set $settings "socket_mode" "0666" -}}
{{- end -}}
{{- if .Values.enclosure.files.enabled -}}
{{- $_ := set $settings.nvme "initiator" "userspace" -}}
{{- end -}}
{{- if $agent.nvme.existingSecret -}}
{{- $_ := set $settings.nvme "secrets_dir" "/etc/ostraca/nvme-secrets" -}}
{{- end -}}
{{- if .Values.tls.agents -}}
{{- $_ := set $settings "tls" (include "ostraca.tlsSettings" . | fromJson) -}}
{{- end -}}
{{ toJson $settings }}
{{- end }}

{{/* Group `tls` of a daemon's settings, as JSON. */}}
{{- define "ostraca.tlsSettings" -}}
{{- $folder := "/etc/ostraca/tls" -}}
{{- $tls := dict "cert" (printf "%s/tls.crt" $folder) "key" (printf "%s/tls.key" $folder) "ca" (printf "%s/ca.crt" $folder) -}}
{{- if .Values.tls.agents -}}
{{- $_ := set $tls "peer_name" (include "ostraca.host" (list . "agent")) -}}
{{- end -}}
{{ toJson $tls }}
{{- end }}

{{- define "ostraca.tlsVolume" -}}
- name: tls
  secret: {secretName: {{ include "ostraca.tlsSecret" . }}, defaultMode: 0440}
{{- end }}

{{/* Settings that the chart derives for an enclosure daemon, as JSON. */}}
{{- define "ostraca.enclosureSettings" -}}
{{- $enclosure := .Values.enclosure -}}
{{- $settings := dict
      "state_dir" "/var/lib/ostraca/enclosure"
      "http_listen" (printf "[::]:%d" (int $enclosure.ports.http))
      "etcd" (include "ostraca.etcdSettings" . | fromJson) -}}
{{- if $enclosure.files.enabled -}}
{{- $_ := set $settings "target" "userspace" -}}
{{- $_ := set $settings "files" "/var/lib/ostraca/drives" -}}
{{- $_ := set $settings "file_drives" $enclosure.files.drives -}}
{{- $_ := set $settings "file_drive_bytes" (printf "%sB" $enclosure.files.size) -}}
{{- end -}}
{{- if $enclosure.nvmet.existingSecret -}}
{{- $_ := set $settings "hosts_file" "/etc/ostraca/hosts/hosts.toml" -}}
{{- end -}}
{{ toJson $settings }}
{{- end }}

{{/* Settings that the chart derives for the admin service, as JSON. */}}
{{- define "ostraca.adminSettings" -}}
{{ dict "listen" (printf "[::]:%d" (int .Values.admin.port))
        "tokens_file" "/etc/ostraca/fabric/tokens.toml"
        "people_file" "/etc/ostraca/fabric/people.toml"
        "follows_reports" .Values.enclosure.files.enabled
        "etcd" (include "ostraca.etcdSettings" . | fromJson)
        "tls" (include "ostraca.tlsSettings" . | fromJson) | toJson }}
{{- end }}

{{/* The whole file of a daemon: (list derived-as-JSON further-settings). */}}
{{- define "ostraca.settingsFile" -}}
{{- include "ostraca.toml" (list "" (mergeOverwrite (index . 0 | fromJson) (index . 1))) | trim -}}
{{- end }}

{{/* Addresses of agents for workers, as JSON. */}}
{{- define "ostraca.workerAgents" -}}
{{- if .Values.worker.agents -}}
{{ toJson .Values.worker.agents }}
{{- else -}}
{{- $service := include "ostraca.serviceAddress" . -}}
{{ list "unix:///run/ostraca/agent.sock" $service | toJson }}
{{- end -}}
{{- end }}

{{/* Address of the Service of agents. */}}
{{- define "ostraca.serviceAddress" -}}
{{ ternary "tls" "tcp" .Values.tls.agents }}://{{ include "ostraca.host" (list . "agent") }}:{{ .Values.agent.ports.peers }}
{{- end }}
