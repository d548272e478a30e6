"""A real schema registry for the tests that are marked long: Apicurio on this machine's Java, 109
MB fetched once into the user's cache."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.schema_registry import SchemaRegistryClient

from relax_events.kafka.embedded.jars import Jar, ensure_files, locate_cache, read_jar_lock
from relax_events.kafka.embedded.java import find_java
from relax_events.kafka.embedded.ports import choose_port

ARCHIVE = Jar(
    path="io/apicurio/apicurio-registry-app/3.0.9/apicurio-registry-app-3.0.9-all.tar.gz",
    size_bytes=108_860_403,
    sha256="2b28181501a20cbf6efcd77f9b7153908fc01f3d3a7c32024c0bd9e1b04c8a43",
)
FLAGS = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dquarkus.http.host=127.0.0.1")
PATIENCE = {"timeout": 20.0, "max.retries": 200, "retries.wait.ms": 50, "retries.max.wait.ms": 1000}
"""The registry says nowhere when it is ready; the client asks until it is: for a minute and a half
on average."""
STOP_SECONDS = 60


@contextmanager
def serve_apicurio(folder: Path) -> Iterator[str]:
    """Yield the address of the Confluent API of a registry in memory; the program is unpacked into
    the folder."""
    (archive,) = ensure_files(
        [ARCHIVE],
        locate_cache(read_jar_lock()).parent / "apicurio",
        title="Apicurio Registry 3.0.9",
    )
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    port = choose_port()
    url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
    command = [
        str(find_java().executable),
        *FLAGS,
        f"-Dquarkus.http.port={port}",
        "-jar",
        next(folder.glob("*-runner.jar")).name,
    ]
    log = folder / "registry.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            with SchemaRegistryClient({"url": url, **PATIENCE}) as client:
                assert client.get_subjects() == [], log.read_text()
            yield url
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)
