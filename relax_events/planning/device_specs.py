"""Devices that `relax plan` can be asked about: memory, speed and bandwidth, from the makers' data
sheets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax_events.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One kind of device.

    Attributes:
        name: As it is written in `--devices`.
        num_bytes: Memory that the driver shows.
        flops: Multiplications and additions a second in bfloat16, without sparsity; 0 if unknown.
        bandwidth: Bytes a second between memory and processor; 0 if unknown.
    """

    name: str
    num_bytes: int
    flops: float = 0.0
    bandwidth: float = 0.0


SPECS = {
    spec.name.lower(): spec
    for spec in (
        DeviceSpec("A100-40GB", 40_960 * MIB, 312e12, 1.555e12),
        DeviceSpec("A100-80GB", 81_920 * MIB, 312e12, 2.039e12),
        DeviceSpec("H20-96GB", 97_871 * MIB, 148e12, 4.0e12),
        DeviceSpec("H100-80GB", 81_559 * MIB, 989e12, 3.35e12),
        DeviceSpec("H800-80GB", 81_559 * MIB, 989e12, 3.35e12),
        DeviceSpec("H200-141GB", 143_771 * MIB, 989e12, 4.8e12),
        DeviceSpec("B200-180GB", 183_359 * MIB, 2250e12, 8.0e12),
        DeviceSpec("L4-24GB", 23_034 * MIB, 121e12, 0.3e12),
        DeviceSpec("L40S-48GB", 46_068 * MIB, 362e12, 0.864e12),
        DeviceSpec("RTX4090-24GB", 24_564 * MIB, 165e12, 1.008e12),
    )
}
ASKED = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?([A-Za-z0-9]+-(\d+)GB)", re.IGNORECASE)


def parse_devices(text: str) -> tuple[int, int, DeviceSpec]:
    """Return the hosts, the devices of each, and their kind, of `8xH100-80GB` or `2x8xH100-80GB`. A
    device of another name has its memory, and no known speed.

    Raises:
        ConfigError: The text is not of this form.
    """
    match = ASKED.fullmatch(text.strip())
    if match is None or "0" in match.groups()[:2]:
        names = ", ".join(spec.name for spec in SPECS.values())
        raise ConfigError(
            f"--devices {text!r} is not of the form 8xH100-80GB, or 2x8xH100-80GB for two "
            f"hosts; known are {names}, and any other NAME-<memory>GB"
        )
    spec = SPECS.get(match[3].lower()) or DeviceSpec(match[3], int(match[4]) * 10**9)
    return int(match[1] or 1), int(match[2] or 1), spec
