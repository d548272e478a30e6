"""Program: converts hostile copies of a good distributed checkpoint, and prints for each its error.

One process for all, because importing megatron-core takes most of the time.

    python -m tests.foreign_checkpoints GOOD BASE FOLDER CANARY
"""

import io
import json
import os
import pickle
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from relax_events.attacks.checkpoints import metadata_pickles
from relax_events.errors import ConfigError
from relax_events.packages.megatron.conversion import convert_to_folder

EMBEDDING = "embedding.word_embeddings.weight"


def change_metadata(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def find_embedding(metadata):
    return next(index for index in metadata.storage_data if index.fqn == EMBEDDING)


def put_code(folder, canary):
    """Put a pickle where the embedding is, once as bytes and once as a tensor."""
    content = metadata_pickles(canary)["os.system"]
    with (folder / "code.distcp").open("wb") as file:
        file.write(content)

    def change(metadata):
        index = find_embedding(metadata)
        stored = metadata.storage_data[index]
        metadata.storage_data[index] = replace(
            stored, relative_path="code.distcp", offset=0, length=len(content)
        )

    change_metadata(folder, change)


def put_code_as_bytes(folder, canary):
    put_code(folder, canary)
    change_metadata(
        folder,
        lambda metadata: metadata.state_dict_metadata.update({EMBEDDING: BytesStorageMetadata()}),
    )


def pack_embedding(folder, canary):
    """Store the embedding compressed."""

    def change(metadata):
        index = find_embedding(metadata)
        stored = metadata.storage_data[index]
        content = (folder / stored.relative_path).read_bytes()[stored.offset :][: stored.length]
        packed = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(content)) as old,
            zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
        ):
            for name in old.namelist():
                new.writestr(name, b"\0" * 10_000_000 if "/data/" in name else old.read(name))
        (folder / "packed.distcp").write_bytes(packed.getvalue())
        metadata.storage_data[index] = replace(
            stored, relative_path="packed.distcp", offset=0, length=len(packed.getvalue())
        )

    change_metadata(folder, change)


def end_early(folder, canary):
    for file in folder.glob("*.distcp"):
        os.truncate(file, 100)


def lose_bytes(folder, canary):
    change_metadata(folder, lambda metadata: metadata.storage_data.pop(find_embedding(metadata)))


def put_code_in_common(folder, canary):
    (folder / "common.pt").write_bytes(metadata_pickles(canary)["os.system"])


def put_code_in_metadata(folder, canary):
    (folder / ".metadata").write_bytes(metadata_pickles(canary)["os.system"])


def put_code_in_metadata_of_a_rank(folder, canary):
    (folder / ".metadata").rename(folder / "unused")
    (folder / "__0.metadata").write_bytes(metadata_pickles(canary)["os.system"])


def link_out(folder, canary):
    (folder / "__0_0.distcp").rename(folder.parent / "outside")
    (folder / "__0_0.distcp").symlink_to(folder.parent / "outside")


def put_pipe(folder, canary):
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")


def name_other_format(folder, canary):
    config = {"sharded_backend": "zarr", "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(config))


def break_config(folder, canary):
    (folder / "metadata.json").write_text("[" * 1000)


ATTACKS = {
    attack.__name__: attack
    for attack in (
        put_code,
        put_code_as_bytes,
        pack_embedding,
        end_early,
        lose_bytes,
        put_code_in_common,
        put_code_in_metadata,
        put_code_in_metadata_of_a_rank,
        link_out,
        put_pipe,
        name_other_format,
        break_config,
    )
}


def main(good, base, folder, canary):
    errors = {}
    for name, attack in ATTACKS.items():
        copy = folder / name
        shutil.copytree(good, copy)
        attack(copy, canary)
        target = folder / f"{name}-to"
        target.mkdir()
        try:  # not confined: the reader alone has to hold
            convert_to_folder(copy, target, base=base)
        except ConfigError as error:
            errors[name] = str(error)
    print(json.dumps(errors))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
