{{- /* The pod of a role's worker. Takes a dict of root, role and kind: Deployment, StatefulSet or Job. */}}
{{- define "relax.pod" -}}
{{- $values := .root.Values }}{{- $role := index $values.roles .role }}
{{- $isReward := eq .role "reward" }}
{{- $port := int $values.metricsPort -}}
{{- $usesApi := and (eq .role "controller") (eq $values.scaling.by "api") -}}
metadata:
  labels:
    {{- include "relax.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    relax-events/worker: "true"
  annotations:
    checksum/run: {{ printf "%s%s" (include "relax.runFile" .root) (toJson $values.run.extraFiles) | sha256sum | trunc 16 | quote }}
spec:
  serviceAccountName: {{ .root.Release.Name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (ceil $values.drainSeconds) 15 }}
  {{- if eq .kind "Job" }}
  restartPolicy: Never
  {{- end }}
  securityContext:
    {{- include "relax.podSecurity" .root | nindent 4 }}
  {{- with $values.images.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - {name: {{ . }}}
    {{- end }}
  {{- end }}
  {{- with $role.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with $role.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  initContainers:
    {{- include "relax.wait" (dict "root" .root "image" (index $values.images $role.image)) | nindent 4 }}
  containers:
    - name: worker
      image: {{ index $values.images $role.image }}
      imagePullPolicy: {{ $values.images.pullPolicy }}
      {{- if eq .kind "Job" }}
      # A drained rank exits with 0, which would end the Job: it is not over until the run is.
      command:
        - sh
        - -c
        - |
          relax worker {{ .role }} configs/run.toml &
          worker=$!
          trap 'drained=1; kill -TERM $worker' TERM
          wait $worker; code=$?
          if [ -n "${drained:-}" ]; then wait $worker; exit 143; fi
          exit $code
      {{- else if has .role (splitList " " (include "relax.ranked" .root)) }}
      command: [relax, worker, {{ .role }}, configs/run.toml]
      {{- else if eq .kind "StatefulSet" }}
      command: [relax, worker, {{ .role }}, configs/run.toml, --index, $(WORKER_INDEX)]
      {{- else if eq .role "advantage" }}
      command: [relax, worker, {{ .role }}, configs/run.toml, --index, host]
      {{- else }}
      command: [relax, worker, {{ .role }}, configs/run.toml]
      {{- end }}
      workingDir: /srv/relax
      env:
        {{- include "relax.environment" (dict "root" .root "principal" .role "given" $role.environment) | nindent 8 }}
        {{- if eq .kind "StatefulSet" }}
        - {name: WORKER_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
        {{- end }}
        {{- if and (has .role (splitList " " (include "relax.ranked" .root))) (gt (int $role.replicas) 1) }}
        {{- if eq .kind "Job" }}
        - {name: RANK, valueFrom: {fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/job-completion-index']"}}}
        - {name: MASTER_ADDR, value: {{ .root.Release.Name }}-trainer-rank-0-0.{{ .root.Release.Name }}-trainer}
        {{- else }}
        - {name: RANK, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
        - {name: MASTER_ADDR, value: {{ .root.Release.Name }}-{{ .role }}-0.{{ .root.Release.Name }}-workers}
        {{- end }}
        - {name: LOCAL_RANK, value: "0"}
        - {name: WORLD_SIZE, value: {{ $role.replicas | quote }}}
        - {name: MASTER_PORT, value: {{ $values.trainer.rendezvousPort | quote }}}
        {{- end }}
        {{- if eq .role "controller" }}
        {{- if $usesApi }}
        - {name: RELAX_SCALING__API, value: "on"}
        - {name: RELAX_SCALING__HOST, value: 0.0.0.0}
        # Policies and the Service keep the port within the namespace; a mesh encrypts it.
        - {name: RELAX_HTTP__ACCEPT_PLAIN, value: "true"}
        - {name: RELAX_SCALING__PORT, value: {{ $values.scaling.port | quote }}}
        - {name: RELAX_SCALING__TOKEN_FILE, value: /run/secrets/scaling/token}
        - {name: RELAX_SCALING__EXTERNAL_AUTOSCALER, value: "true"}
        - {name: RELAX_SCALING__MAX_WORKERS, value: {{ $values.scaling.keda.max | quote }}}
        {{- else }}
        - {name: RELAX_SCALING__API, value: "off"}
        {{- end }}
        {{- end }}
      {{- with $values.objects.secret }}
      envFrom: [{secretRef: {name: {{ . }}}}]
      {{- end }}
      ports:
        - {name: metrics, containerPort: {{ $port }}}
        {{- if $usesApi }}
        - {name: api, containerPort: {{ $values.scaling.port }}}
        {{- end }}
      startupProbe: {httpGet: {path: /healthz, port: metrics}, periodSeconds: 5, timeoutSeconds: 5, failureThreshold: 720}
      livenessProbe: {httpGet: {path: /healthz, port: metrics}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {httpGet: {path: /readyz, port: metrics}, periodSeconds: 5, timeoutSeconds: 5}
      resources:
        requests: {{ toJson $role.resources.requests }}
        limits:
          {{- toYaml $role.resources.limits | nindent 10 }}
          {{- if $role.devices }}
          {{ $values.devices.resource }}: {{ $role.devices | quote }}
          {{- end }}
      securityContext:
        {{- include "relax.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        {{- include "relax.mounts" (dict "root" .root "principal" .role "readOnly" true) | nindent 8 }}
        {{- if not $isReward }}
        {{- include "relax.writableMounts" (dict "root" .root "role" .role) | trim | nindent 8 }}
        {{- end }}
        {{- if $role.sharedMemory }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if $usesApi }}
        - {name: scaling-token, mountPath: /run/secrets/scaling, readOnly: true}
        {{- end }}
  volumes:
    {{- include "relax.volumes" (dict "root" .root "principal" .role "tmp" $role.tmp) | nindent 4 }}
    {{- with $role.sharedMemory }}
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
    {{- end }}
    {{- if $usesApi }}
    - {name: scaling-token, secret: {secretName: {{ required "scaling.tokenSecret must name a Secret with the key token, as scaling.by is api" $values.scaling.tokenSecret }}, defaultMode: 0440}}
    {{- end }}
{{- end }}
