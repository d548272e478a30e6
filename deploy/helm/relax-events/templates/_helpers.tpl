{{- define "relax.labels" -}}
app.kubernetes.io/name: relax-events
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "relax.selector" -}}
app.kubernetes.io/name: relax-events
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Roles whose workers share the work; the API can scale them. Those and the ranks have an index for life. */}}
{{- define "relax.elastic" -}}rollout reward judge reference actor-forward teacher{{- end }}
{{- define "relax.ranked" -}}trainer critic{{- end }}
{{- define "relax.indexed" -}}{{ include "relax.elastic" . }} {{ include "relax.ranked" . }}{{- end }}

{{- /* Names of Services begin with a letter and hold no dot; those of pods with the suffix of the longest role fit 63 characters. */}}
{{- define "relax.checkName" -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,36}[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the release's name %q must have at most 38 of a-z, 0-9 and -, begin with a letter and not end with -: it is the run's id and part of Kubernetes' names" .Release.Name) -}}
{{- end -}}
{{- end }}

{{- /* A setting as text: a whole number of a values file is a float, which would become 1e+06. */}}
{{- define "relax.text" -}}
{{- if kindIs "float64" . }}{{ if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{- define "relax.claim" -}}{{ .Values.storage.existingClaim | default (printf "%s-files" .Release.Name) }}{{- end }}

{{- define "relax.bootstrapServers" -}}
{{- if eq .Values.kafka.kind "own" -}}{{ .Release.Name }}-kafka:9092
{{- else if eq .Values.kafka.kind "strimzi" -}}{{ .Values.kafka.strimzi.cluster }}-kafka-bootstrap:9093
{{- else -}}{{ required "kafka.bootstrapServers must name the cluster, as kafka.kind is existing" .Values.kafka.bootstrapServers }}
{{- end -}}
{{- end }}

{{- define "relax.runFile" -}}{{ required "run.file must hold the run file's text: --set-file run.file=configs/quickstart.toml" .Values.run.file }}{{- end }}

{{- /* Names what has been prepared: changes with the run file, the image, the broker and the folders of the object store. */}}
{{- define "relax.prepared" -}}
{{- printf "%s %s %s %s %s %s" .Release.Name (include "relax.runFile" .) .Values.images.model (include "relax.bootstrapServers" .) (toJson .Values.run.extraFiles) (.Files.Get "files/store.json") | sha256sum | trunc 10 -}}
{{- end }}

{{- define "relax.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "relax.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Settings of every worker and command, each name once: an upgrade would mix two of a name up. Takes a dict of root, principal, and of
a role's own environment in `given`. */}}
{{- define "relax.environment" -}}
{{- $root := .root }}{{- $values := .root.Values -}}
- {name: RELAX_RUN__ID, value: {{ $root.Release.Name | quote }}}
- {name: RELAX_RUN__DIRECTORY, value: .relax}
- {name: RELAX_BROKER__BOOTSTRAP_SERVERS, value: {{ include "relax.bootstrapServers" $root | quote }}}
- {name: RELAX_BROKER__REPLICATION_FACTOR, value: {{ $values.kafka.replicationFactor | quote }}}
- {name: RELAX_WORKERS__DRAIN_SECONDS, value: {{ include "relax.text" $values.drainSeconds | quote }}}
- {name: RELAX_TELEMETRY__METRICS_HOST, value: 0.0.0.0}
- {name: RELAX_TELEMETRY__METRICS_PORT, value: {{ $values.metricsPort | quote }}}
{{- range $role := splitList " " (printf "%s advantage" (include "relax.elastic" $root)) }}
{{- $given := index $values.roles $role }}
{{- if $given.enabled }}
- {name: RELAX_WORKERS__{{ $role | replace "-" "_" | upper }}, value: {{ $given.replicas | quote }}}
{{- end }}
{{- end }}
{{- range $role := splitList " " (include "relax.ranked" $root) }}
{{- $given := index $values.roles $role }}
{{- if $given.enabled }}
- {name: RELAX_{{ upper $role }}__RANKS, value: {{ $given.replicas | quote }}}
{{- end }}
{{- end }}
{{- with $values.objects.uri }}
- {name: RELAX_OBJECTS__URI, value: {{ . | quote }}}
{{- end }}
{{- if include "relax.hasLogin" $root }}
{{- if $values.kafka.secret }}
- {name: RELAX_BROKER__USERNAME, value: {{ required "kafka.username must be given with kafka.secret" $values.kafka.username | quote }}}
{{- else }}
- {name: RELAX_BROKER__USERNAME, value: relax.{{ $root.Release.Name }}.{{ .principal }}}
{{- end }}
- {name: RELAX_BROKER__PASSWORD_FILE, value: /run/secrets/broker/password}
- {name: RELAX_BROKER__CA_FILE, value: /run/secrets/broker/ca.crt}
{{- end }}
{{- if $values.objects.secretPrefix }}
- {name: OBJECTS_CREDENTIALS_FILE, value: /run/secrets/objects/credentials}
{{- end }}
{{- range $name, $value := merge (dict) (.given | default dict) $values.run.environment }}
- {name: {{ $name }}, value: {{ include "relax.text" $value | quote }}}
{{- end }}
{{- end }}

{{- /* Whether clients log in to Kafka: "yes" or nothing. */}}
{{- define "relax.hasLogin" -}}
{{- if or (ne .Values.kafka.kind "existing") .Values.kafka.secret .Values.kafka.secretPrefix -}}yes{{- end -}}
{{- end }}

{{- /* The Secret of a principal of a cluster that is there already. Takes a dict of root and principal. */}}
{{- define "relax.brokerSecret" -}}
{{- if .root.Values.kafka.secretPrefix }}{{ .root.Values.kafka.secretPrefix }}-{{ .principal }}{{ else }}{{ .root.Values.kafka.secret }}{{ end -}}
{{- end }}

{{- /* What every pod mounts. Takes a dict of root, principal, and readOnly: false for the job, which writes all of the run's files. */}}
{{- define "relax.mounts" -}}
- {name: files, mountPath: /srv/relax/.relax, readOnly: {{ .readOnly }}}
- {name: run, mountPath: /srv/relax/configs, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if eq .root.Values.kafka.kind "own" }}
- {name: security, mountPath: /run/secrets/broker/password, subPath: secrets/relax.{{ .root.Release.Name }}.{{ .principal }}, readOnly: true}
- {name: security, mountPath: /run/secrets/broker/ca.crt, subPath: ca.pem, readOnly: true}
{{- else if include "relax.hasLogin" .root }}
- {name: broker, mountPath: /run/secrets/broker, readOnly: true}
{{- end }}
{{- if .root.Values.objects.secretPrefix }}
- {name: objects, mountPath: /run/secrets/objects, readOnly: true}
{{- end }}
{{- end }}

{{- /* Where a role may write below the run's files, which it mounts read-only: the run's folder, and of its object store the folders that the
role changes. The folder above the store is no part of it, so that no role can put another folder in the place of the store. Takes a dict of
root and role. */}}
{{- define "relax.writableMounts" -}}
{{- $name := .root.Release.Name }}
- {name: files, mountPath: /srv/relax/.relax/media-cache, subPath: media-cache, readOnly: false}
- {name: files, mountPath: /srv/relax/.relax/runs/{{ $name }}, subPath: runs/{{ $name }}, readOnly: false}
{{- if not .root.Values.objects.uri }}
- {name: files, mountPath: /srv/relax/.relax/runs/{{ $name }}/objects, subPath: runs/{{ $name }}/objects, readOnly: true}
{{- range index (.root.Files.Get "files/store.json" | fromJson) .role }}
- {name: files, mountPath: /srv/relax/.relax/runs/{{ $name }}/objects/{{ . }}, subPath: runs/{{ $name }}/objects/{{ . }}, readOnly: false}
{{- end }}
{{- end }}
{{- end }}

{{- define "relax.volumes" -}}
{{- $values := .root.Values -}}
- {name: files, persistentVolumeClaim: {claimName: {{ include "relax.claim" .root }}}}
- {name: run, configMap: {name: {{ .root.Release.Name }}-run}}
- {name: tmp, emptyDir: {sizeLimit: {{ .tmp | default "2Gi" }}}}
{{- if $values.objects.secretPrefix }}
- {name: objects, secret: {secretName: {{ $values.objects.secretPrefix }}-{{ .principal }}, items: [{key: credentials, path: credentials}], defaultMode: 0440}}
{{- end }}
{{- if eq $values.kafka.kind "own" }}
- {name: security, persistentVolumeClaim: {claimName: {{ .root.Release.Name }}-security}}
{{- else if eq $values.kafka.kind "strimzi" }}
- name: broker
  projected:
    sources:
      - secret: {name: relax.{{ .root.Release.Name }}.{{ .principal }}, items: [{key: password, path: password}]}
      - secret: {name: {{ $values.kafka.strimzi.cluster }}-cluster-ca-cert, items: [{key: ca.crt, path: ca.crt}]}
{{- else if include "relax.hasLogin" .root }}
- {name: broker, secret: {secretName: {{ include "relax.brokerSecret" . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- /* An init container that waits until the topics and the model are there: see prepare.yaml. Takes a dict of root and image. */}}
{{- define "relax.wait" -}}
- name: wait
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [sh, -c, "until [ -f .relax/prepared/{{ include "relax.prepared" .root }} ]; do sleep 1; done"]
  workingDir: /srv/relax
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
  securityContext:
    {{- include "relax.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: files, mountPath: /srv/relax/.relax, readOnly: true}
{{- end }}
