"""The secret of an application: random, and the same for every process and every deployment of it.

It is kept in the key-value store of Ray's control service, where the first process to look for it
puts it. An argument of deployments could not carry it, because a random one would differ at each
`serve deploy`, and Serve would restart every replica. Nothing else may show it: whoever has it is
trusted.

`ray.experimental.internal_kv` is what Ray itself keeps such things in, from its job manager to its
runtime environments, and has had these functions since before Ray 1.0; a client of one's own, as
Ray Serve has, would depend on the signatures of Ray's compiled core. It is used here, in
`kept_totals.py` and in `failed_starts.py` alone.
"""

from __future__ import annotations

import secrets

from ray.experimental import internal_kv

from cluster.wire.credentials import SECRET_BYTES

NAMESPACE = b"lockstep"


def application_secret(app_name: str) -> bytes:
    """Return the secret of the application of this name. Blocks for a moment.

    Raises:
        RuntimeError: this process is not connected to Ray, or the store lost what was put there.
    """
    if not internal_kv._internal_kv_initialized():
        raise RuntimeError("secret: wanted a process that is connected to Ray, found none")
    key = f"secret:{app_name}".encode()
    internal_kv._internal_kv_put(
        key, secrets.token_bytes(SECRET_BYTES), overwrite=False, namespace=NAMESPACE
    )
    found = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    if found is None:
        raise RuntimeError(f"secret: wanted that of application {app_name!r}, found none")
    return bytes(found)
