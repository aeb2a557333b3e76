"""Compiled executables on disk, found again before anything is traced.

JAX's compilation cache is asked with what was lowered, and to trace and lower all steps of a large model takes the
better part of a minute of Python. This one is asked with all that the lowering depends on.
"""

import hashlib
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
from jax.experimental import serialize_executable

import pallas_kernels

log = logging.getLogger(__name__)
NOT_KEPT = ("cpu",)  # platforms whose executables do not run any more once they were read, written and read again


def keep(key: tuple[Any, ...], devices: Sequence[jax.Device], compile: Callable[[], Any]) -> Any:
    """What `compile` returns for these devices, or what an earlier process left in the folder `prefix_jax` of JAX's
    compilation cache; without such a cache nothing is kept. The folder is to be trusted: what lies there is unpickled
    and run.

    key: by its repr, with the sources of this package, the versions, the devices and the flags of XLA.
    """
    path, client = _path(key, devices), devices[0].client
    if path is None:
        return compile()
    try:
        made = pickle.loads(path.read_bytes())
        return serialize_executable.deserialize_and_load(*made, backend=client, execution_devices=devices)
    except FileNotFoundError:
        pass
    except Exception as error:
        log.warning("%s cannot be loaded and is made anew: %s", path, error)
    compiled = compile()
    try:
        _write(path, pickle.dumps(serialize_executable.serialize(compiled)))
    except Exception as error:
        log.warning("an executable is not kept in %s: %s", path.parent, error)
    return compiled


def keep_size(key: tuple[Any, ...], devices: Sequence[jax.Device], least: int, most: int) -> int:
    """A size that executables have, of which `most` is possible now: the one that an earlier process with this key had,
    if it is in [least, most], so that its executables are found; else `most`, for later processes."""
    path = _path(("size", key), devices)
    if path is None:
        return most
    try:
        if least <= (size := int(path.read_text())) <= most:
            return size
    except (OSError, ValueError):
        pass
    try:
        _write(path, str(most).encode())
    except OSError as error:
        log.warning("a size is not kept in %s: %s", path.parent, error)
    return most


def _path(key: tuple[Any, ...], devices: Sequence[jax.Device]) -> Path | None:
    """Where what depends on this key is kept; None for nowhere."""
    cache = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    if not cache or "://" in cache or devices[0].platform in NOT_KEPT or sources() != IMPORTED:
        return None
    of_devices = [(device.device_kind, device.id) for device in devices]
    environment = IMPORTED, versions(devices[0].client), flags()
    digest = hashlib.sha256(repr((environment, of_devices, key)).encode()).hexdigest()
    return Path(cache) / "prefix_jax" / digest


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing, whoever else writes the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def sources() -> str:
    """A digest of this package and the kernels, tables of measurements included, as they are on disk now."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(pallas_kernels.__file__).parent):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


IMPORTED = sources()  # what runs; if the files are others by now, nobody knows what they would make


def versions(client: Any) -> tuple[str, ...]:
    return jax.__version__, jaxlib.__version__, flax.__version__, client.platform_version


def flags() -> tuple[Any, ...]:
    return os.environ.get("XLA_FLAGS"), jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
