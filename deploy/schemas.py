"""Write deploy/helm/schemas.json: the schemas of the kinds that the chart uses, without texts, from
Kubernetes' OpenAPI document and from the operators' CustomResourceDefinitions.

python -m deploy.schemas swagger.json FOLDER_OF_CRDS

The document is api/openapi-spec/swagger.json of the Go module k8s.io/kubernetes; the folder holds
the CustomResourceDefinitions as *.yaml or *.yaml.gz. Both are under Apache-2.0.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "helm" / "schemas.json"
KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "batch/v1": ("Job",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}
"""The kinds of Kubernetes itself, by API version."""
RESOURCES = (
    "jobset-jobsets",
    "keda-scaledobjects",
    "prometheus-prometheusrules",
    "prometheus-servicemonitors",
    "strimzi-kafka",
    "strimzi-kafkanodepool",
    "strimzi-kafkatopic",
    "strimzi-kafkauser",
)
"""Files of CustomResourceDefinitions, without their endings."""
POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
TEXTS = ("description", "x-kubernetes-validations", "default", "example")
"""Keys of a schema that check nothing; rules in CEL are checked by a real API server alone."""


def strip(schema: Any) -> Any:
    """Return a schema without texts, which refuses unknown keys as `kubectl apply` does."""
    if isinstance(schema, list):
        return [strip(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    properties = schema.get("properties")
    stripped = {
        key: strip(value)
        for key, value in schema.items()
        if key != "properties" and key not in TEXTS and not key.startswith("x-kubernetes")
    }
    if isinstance(properties, dict):
        stripped["properties"] = {name: strip(value) for name, value in properties.items()}
        if "additionalProperties" not in schema:
            stripped["additionalProperties"] = False
    return stripped


def find_references(schema: Any) -> set[str]:
    """Return the names of the definitions that a schema refers to."""
    if isinstance(schema, list):
        return set().union(*map(find_references, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    names = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return names.union(*map(find_references, schema.values()))


def read_kubernetes(document: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of `KINDS` and of all that they refer to."""
    schemas = document["definitions"]
    names = {
        f"{group['group']}/{group['version']}".lstrip("/") + f" {group['kind']}": name
        for name, schema in schemas.items()
        for group in schema.get("x-kubernetes-group-version-kind", [])
    }
    kinds = {
        f"{version} {kind}": names[f"{version} {kind}"]
        for version, kind_names in KINDS.items()
        for kind in kind_names
    }
    pending, definitions = [*kinds.values(), POD_TEMPLATE], {}
    while pending:
        name = pending.pop()
        if name not in definitions:
            definitions[name] = strip(schemas[name])
            pending += find_references(definitions[name])
    return {
        "kinds": {kind: {"$ref": f"#/definitions/{name}"} for kind, name in kinds.items()},
        "definitions": definitions,
    }


def read_resource(definition: dict[str, Any]) -> tuple[str, Any]:
    """Return the kind and the schema of a CustomResourceDefinition's stored version."""
    spec = definition["spec"]
    version = next(one for one in spec["versions"] if one["storage"])
    schema = strip(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {
        "$ref": "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
    }
    if spec["names"]["kind"] == "JobSet":  # a copy of Kubernetes' own schema, and half a megabyte
        jobs = schema["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"]
        job = jobs["template"]["properties"]["spec"]["properties"]
        job["template"] = {"$ref": f"#/definitions/{POD_TEMPLATE}"}
    return f"{spec['group']}/{version['name']} {spec['names']['kind']}", schema


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("resources", type=Path)
    arguments = parser.parse_args()
    schemas = read_kubernetes(json.loads(arguments.document.read_text()))
    for name in RESOURCES:
        (path,) = arguments.resources.glob(f"{name}.yaml*")
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for definition in yaml.safe_load_all(text):
            if definition:
                kind, schema = read_resource(definition)
                schemas["kinds"][kind] = schema
    SCHEMAS.write_text(json.dumps(schemas, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
