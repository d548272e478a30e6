{{- define "relax.preparePod" -}}
{{- $values := .Values }}{{- $role := .Values.roles.prepare -}}
metadata:
  labels:
    {{- include "relax.selector" . | nindent 4 }}
    app.kubernetes.io/component: prepare
spec:
  serviceAccountName: {{ .Release.Name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  restartPolicy: Never
  securityContext:
    {{- include "relax.podSecurity" . | nindent 4 }}
  {{- with $values.images.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - {name: {{ . }}}
    {{- end }}
  {{- end }}
  {{- if eq $values.kafka.kind "own" }}
  initContainers:
    # The users and their rights, once the broker's pod has made the passwords, as the only user that may.
    - name: access
      image: {{ $values.images.light }}
      imagePullPolicy: {{ $values.images.pullPolicy }}
      command:
        - sh
        - -ec
        - |
          until [ -f /security/security.toml ]; do sleep 1; done
          until relax broker secure configs/run.toml --out /security --apply --yes; do code=$?; [ $code -eq 3 ] || exit $code; sleep 2; done
      workingDir: /srv/relax
      env:
        - {name: RELAX_RUN__ID, value: {{ .Release.Name | quote }}}
        - {name: RELAX_BROKER__BOOTSTRAP_SERVERS, value: {{ include "relax.bootstrapServers" . | quote }}}
      resources: {requests: {cpu: 50m, memory: 128Mi}, limits: {memory: 512Mi}}
      securityContext:
        {{- include "relax.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: security, mountPath: /security, readOnly: false}
        - {name: run, mountPath: /srv/relax/configs, readOnly: true}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: prepare
      image: {{ index $values.images $role.image }}
      imagePullPolicy: {{ $values.images.pullPolicy }}
      # Exit code 3: the broker does not answer yet.
      command:
        - sh
        - -ec
        - |
          until relax topics apply configs/run.toml --yes; do code=$?; [ $code -eq 3 ] || exit $code; sleep 2; done
          relax models prepare configs/run.toml
          mkdir -p .relax/prepared .relax/media-cache .relax/runs/{{ .Release.Name }}
          {{- if not $values.objects.uri }}
          {{- range index (.Files.Get "files/store.json" | fromJson) "all" }}
          mkdir -p .relax/runs/{{ $.Release.Name }}/objects/{{ . }}
          {{- end }}
          {{- end }}
          touch .relax/prepared/{{ include "relax.prepared" . }}
      workingDir: /srv/relax
      env:
        {{- include "relax.environment" (dict "root" . "principal" "operator") | nindent 8 }}
      {{- with $values.objects.secret }}
      envFrom: [{secretRef: {name: {{ . }}}}]
      {{- end }}
      resources: {{ toJson $role.resources }}
      securityContext:
        {{- include "relax.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "relax.mounts" (dict "root" . "principal" "operator" "readOnly" false) | nindent 8 }}
  volumes:
    {{- include "relax.volumes" (dict "root" . "principal" "operator" "tmp" $role.tmp) | nindent 4 }}
{{- end }}
