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
          mkdir -p .relax/prepared
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
        {{- include "relax.mounts" (dict "root" . "readOnly" false) | nindent 8 }}
  volumes:
    {{- include "relax.volumes" (dict "root" . "principal" "operator" "tmp" $role.tmp) | nindent 4 }}
{{- end }}
