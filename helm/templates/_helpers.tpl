{{- /* One release serves a cluster, so names do not carry that of the release. */ -}}
{{- define "sheave.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default .Chart.Name }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "sheave.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sheave.labels" -}}
{{ include "sheave.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "sheave.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}

{{- /* What every container of the pod is, beside its name, its arguments and its probes. */ -}}
{{- define "sheave.container" -}}
image: {{ include "sheave.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - name: NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
  - name: SHEAVE_BPFFS
    value: {{ .Values.agent.bpffs | quote }}
  - name: SHEAVE_RUN_DIR
    value: {{ .Values.agent.runDir | quote }}
  - name: SHEAVE_NETFILTER_SYSCTLS
    value: {{ include "sheave.netfilterSysctls" . | quote }}
  {{- with .Values.agent.cgroupRoot }}
  - name: SHEAVE_CGROUP_ROOT
    value: {{ . | quote }}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext:
  runAsUser: 0
  runAsGroup: 0
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    add:
      {{- if include "sheave.closesPodSockets" . }}
      {{- append .Values.capabilities "SYS_ADMIN" | uniq | toYaml | nindent 6 }}
      {{- else }}
      {{- toYaml .Values.capabilities | nindent 6 }}
      {{- end }}
  {{- with .Values.seccompProfile }}
  seccompProfile:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and .Values.appArmorProfile (include "sheave.appArmorField" .) }}
  appArmorProfile:
    {{- toYaml .Values.appArmorProfile | nindent 4 }}
  {{- end }}
  {{- with .Values.seLinuxOptions }}
  seLinuxOptions:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- with .Values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: bpffs
    mountPath: {{ .Values.agent.bpffs | quote }}
  - name: cgroups
    mountPath: {{ include "sheave.cgroups" . | quote }}
    readOnly: true
  {{- if include "sheave.closesPodSockets" . }}
  - name: namespaces
    mountPath: /run/netns
    mountPropagation: HostToContainer # those of pods to come, too
    readOnly: true
  {{- end }}
  - name: run
    mountPath: {{ .Values.agent.runDir | quote }}
  {{- with include "sheave.netfilterSysctls" . }}
  - name: netfilter
    mountPath: {{ . | quote }}
  {{- end }}
  {{- if include "sheave.kubeProxyConfig" . }}
  - name: config
    mountPath: /etc/kube-proxy
    readOnly: true
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Where cgroups are mounted: the folder that is served need not exist before its node does. */ -}}
{{- define "sheave.cgroups" -}}
{{- $root := .Values.agent.cgroupRoot | default "/sys/fs/cgroup" -}}
{{- if hasPrefix "/sys/fs/cgroup/" (printf "%s/" $root) -}}
/sys/fs/cgroup
{{- else if contains "$(" $root -}}
{{- fail (printf "\n\nagent.cgroupRoot is %s: outside of /sys/fs/cgroup it is mounted as it is written, so it cannot differ from node to node." $root) -}}
{{- else -}}
{{ $root }}
{{- end -}}
{{- end -}}

{{- /* Where they are in the container, where they are wanted: no runtime mounts below /proc. */ -}}
{{- define "sheave.netfilterSysctls" -}}
{{- if and .Values.agent.netfilterSysctls (not .Values.cleanup) }}/host{{ .Values.agent.netfilterSysctls }}{{ end -}}
{{- end -}}

{{- /* Cleaning closes nothing: it needs neither the capability nor the namespaces. */ -}}
{{- define "sheave.closesPodSockets" -}}
{{- if and .Values.closePodSockets (not .Values.cleanup) }}true{{ end -}}
{{- end -}}

{{- /* URLs of the API server, separated by commas; empty where the agent gets its address from somewhere else. */ -}}
{{- define "sheave.apiServers" -}}
{{- $api := .Values.apiServer -}}
{{- $choices := list -}}
{{- if $api.host }}{{ $choices = append $choices "apiServer.host" }}{{ end -}}
{{- if $api.urls }}{{ $choices = append $choices "apiServer.urls" }}{{ end -}}
{{- if $api.inCluster }}{{ $choices = append $choices "apiServer.inCluster" }}{{ end -}}
{{- if .Values.agent.manifests }}{{ $choices = append $choices "agent.manifests" }}{{ end -}}
{{- if gt (len $choices) 1 -}}
{{- fail (printf "\n\nOnly one of %s can be used." (join " and " $choices)) -}}
{{- end -}}
{{- if not (or $choices .Values.agent.kubeconfig .Values.cleanup) -}}
{{- fail (include "sheave.apiServerMissing" .) -}}
{{- end -}}
{{- if $api.host -}}
https://{{ if contains ":" $api.host }}[{{ $api.host }}]{{ else }}{{ $api.host }}{{ end }}:{{ int $api.port }}
{{- else -}}
{{ join "," $api.urls }}
{{- end -}}
{{- end -}}

{{- define "sheave.apiServerMissing" }}

The address of the API server is missing. The agents cannot use its ClusterIP, which works only once they do. Give
  --set apiServer.host=ADDRESS [--set apiServer.port=6443]    or    --set 'apiServer.urls={https://…,https://…}'
This command shows the addresses to choose from; with several servers use their load balancer, or all of them as URLs:
  kubectl get endpointslices -n default -l kubernetes.io/service-name=kubernetes
Where something else serves ClusterIPs on every node, say so: --set apiServer.inCluster=true
{{ end -}}

{{- /* kube-proxy's configuration, as the agent is to read it: with the pod's own credentials. */ -}}
{{- define "sheave.kubeProxyConfig" -}}
{{- if and (kindIs "string" .Values.kubeProxyConfig) (not (trim .Values.kubeProxyConfig)) -}}
{{- fail "\n\nkubeProxyConfig is given but empty: the cluster has kube-proxy's configuration under another name (on EKS in ConfigMap kube-proxy-config, key config), or has none (k3s, RKE2): then leave it out." -}}
{{- end -}}
{{- with .Values.kubeProxyConfig -}}
{{- $config := fromYaml . -}}
{{- if ne (toString $config.kind) "KubeProxyConfiguration" -}}
{{- fail (printf "\n\nkubeProxyConfig is not a KubeProxyConfiguration: %s" ($config.Error | default (printf "its kind is %q" (toString $config.kind)))) -}}
{{- end -}}
{{- omit $config "clientConnection" | toYaml -}}
{{- end -}}
{{- end -}}

{{- /* Names and values below `agent` that are set. */ -}}
{{- define "sheave.flags" -}}
{{- $flags := dict -}}
{{- range $name, $value := .Values.agent -}}
{{- if not (or (kindIs "invalid" $value) (and (kindIs "slice" $value) (empty $value))) -}}
{{- $_ := set $flags $name $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $flags -}}
{{- end -}}

{{- /* Where the agent serves something: list of the root, its name below `agent`, and the default. */ -}}
{{- define "sheave.address" -}}
{{- $root := index . 0 -}}
{{- $own := get $root.Values.agent (index . 1) -}}
{{- if kindIs "invalid" $own -}}
{{- get (include "sheave.kubeProxyConfig" $root | fromYaml) (index . 1) | default (index . 2) -}}
{{- else -}}
{{- $own -}}
{{- end -}}
{{- end -}}

{{- define "sheave.healthzAddress" -}}
{{- include "sheave.address" (list . "healthzBindAddress" "0.0.0.0:10256") -}}
{{- end -}}

{{- define "sheave.metricsAddress" -}}
{{- include "sheave.address" (list . "metricsBindAddress" "127.0.0.1:10249") -}}
{{- end -}}

{{- /* The command line. What every command of `sheave` on the node needs is in the environment instead. */ -}}
{{- define "sheave.args" -}}
- agent
{{- with include "sheave.apiServers" . }}
- {{ printf "--api-server=%s" . | quote }}
{{- end }}
{{- if .Values.kubeProxyConfig }}
- "--config=/etc/kube-proxy/config.conf"
{{- end }}
{{- range $name, $value := omit (include "sheave.flags" . | fromYaml) "bpffs" "runDir" "cgroupRoot" "netfilterSysctls" }}
- {{ printf "--%s=%s" (kebabcase $name) (include "sheave.text" $value) | quote }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ quote . }}
{{- end }}
{{- end -}}

{{- /* A value as the agent reads it. Numbers are floats in templates: large ones would be written like 1e+06. */ -}}
{{- define "sheave.text" -}}
{{- if kindIs "slice" . }}{{ join "," . }}{{ else if kindIs "float64" . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{- /* Port of an address as the agent reads it: dict "address", "default". */ -}}
{{- define "sheave.port" -}}
{{- if or (contains "]:" .address) (regexMatch "^[^:]*:[0-9]+$" .address) -}}
{{ regexFind "[0-9]+$" .address }}
{{- else -}}
{{ .default }}
{{- end -}}
{{- end -}}

{{- /* Refuses monitors that could not reach the metrics. */ -}}
{{- define "sheave.metricsReachable" -}}
{{- $address := include "sheave.metricsAddress" . -}}
{{- if regexMatch "^(127\\.|\\[?::1\\]?(:[0-9]+)?$|localhost)" $address -}}
{{- fail (printf "\n\nPrometheus cannot reach metrics at %s. With a monitor, set agent.metricsBindAddress, for example to 0.0.0.0:10249; anybody who can reach the node can then read the metrics." $address) -}}
{{- end -}}
{{- end -}}

{{- /* Before Kubernetes 1.30 AppArmor's profile is named by an annotation. */ -}}
{{- define "sheave.appArmorField" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end -}}

{{- define "sheave.appArmorAnnotation" -}}
{{- if eq .type "Localhost" }}localhost/{{ .localhostProfile }}{{ else if eq .type "Unconfined" }}unconfined{{ else }}runtime/default{{ end -}}
{{- end -}}

{{- /* An agent is known by its node, whatever its pod is called today. */ -}}
{{- define "sheave.nodeLabel" -}}
- sourceLabels: [__meta_kubernetes_pod_node_name]
  targetLabel: node
{{- end -}}
