"""Makes the certificates, passwords and rights of a cluster and the runs on it, and brings them
onto the brokers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import orjson

from relax_events.config import BrokerConfig, RunConfig, RunSection
from relax_events.errors import ConfigError
from relax_events.kafka.connection import Connection
from relax_events.kafka.security.acls import (
    PRINCIPALS,
    Acl,
    build_acls,
    build_run_prefix,
    build_username,
)
from relax_events.kafka.security.folder import ADMIN, EMBEDDED_HOST, SecurityFolder
from relax_events.kafka.security.principals import PrincipalAdmin, SecurityChanges
from relax_events.kafka.security.settings import build_broker_settings, read_admin_settings
from relax_events.secret_handling import read_secret, write_private
from relax_events.session.principals import build_principal_environment

LOCAL_HOSTS = ("127.0.0.1", "localhost")
CA_LIFETIME = timedelta(days=3650)
WORLD_READABLE = 0o644


@dataclass(frozen=True, slots=True)
class Renewal:
    """Whether existing certificates and passwords are created again. New passwords take effect once
    applied, new certificates once brokers restart.
    """

    certificates: bool = False
    passwords: bool = False


def create_folder(
    config: RunConfig,
    path: Path,
    *,
    hosts: Sequence[str] = (),
    lifetime: timedelta,
    renewal: Renewal = Renewal(),
) -> list[Path]:
    """Create a security folder or add a run to it; existing files stay, unless they are to be
    renewed.

    Args:
        config: The run.
        path: The folder, one for a cluster.
        hosts: Brokers that need a certificate, by the name that clients use.
        lifetime: Of brokers' certificates.
        renewal: Which existing files to create again.
    Returns:
        The files that were written.
    Raises:
        ConfigError: The folder has an authority's certificate without its key, so that nothing can
            be signed.
    """
    folder = SecurityFolder(path.absolute())
    written = _make_certificates(folder, hosts, lifetime=lifetime, renew=renewal.certificates)
    users = [build_username(config.run.id, principal) for principal in PRINCIPALS]
    written += [
        folder.password_file(user)
        for user in users
        if folder.ensure_password(user, renew=renewal.passwords)
    ]
    if folder.ensure_password(ADMIN):
        written.append(folder.password_file(ADMIN))
    texts = {folder.environment_file(user): _environment_text(folder, user) for user in users}
    texts[folder.acl_file(config.run.id)] = orjson.dumps(
        [acl.to_dict() for acl in build_run_acls(config)], option=orjson.OPT_INDENT_2
    )
    texts[folder.properties_file] = _properties_text(folder)
    texts[folder.path / "security.toml"] = _overlay_text(folder)
    return written + [file for file, text in texts.items() if _write_if_new(file, text)]


def _make_certificates(
    folder: SecurityFolder, hosts: Sequence[str], *, lifetime: timedelta, renew: bool
) -> list[Path]:
    from relax_events.kafka.security.certificates import (
        KeyPair,
        make_authority,
        make_broker_certificate,
    )

    hosts_by_certificate = {EMBEDDED_HOST: LOCAL_HOSTS, **{host: (host,) for host in hosts}}
    written = []
    if not folder.ca_file.exists():
        authority = make_authority(lifetime=CA_LIFETIME)
        write_private(folder.ca_key_file, authority.key)
        write_private(folder.ca_file, authority.certificate, mode=WORLD_READABLE)
        written += [folder.ca_key_file, folder.ca_file]
    missing = {
        name: names
        for name, names in hosts_by_certificate.items()
        if renew or not folder.broker_file(name).exists()
    }
    if missing and not folder.ca_key_file.exists():
        names = ", ".join(missing)
        raise ConfigError(
            f"{folder.ca_key_file} is not there, so certificates for {names} can't be "
            "signed; run this where the key is kept"
        )
    for name, hosts_of_it in missing.items():
        authority = KeyPair(folder.ca_key_file.read_bytes(), folder.ca_file.read_bytes())
        pair = make_broker_certificate(authority, hosts_of_it, lifetime=lifetime)
        write_private(folder.broker_file(name), pair.key + pair.certificate)
        written.append(folder.broker_file(name))
    return written


def _write_if_new(file: Path, text: bytes) -> bool:
    if file.exists() and file.read_bytes() == text:
        return False
    write_private(file, text)
    return True


def _environment_text(folder: SecurityFolder, user: str) -> bytes:
    return "".join(
        f"{name}={value}\n" for name, value in build_principal_environment(folder, user).items()
    ).encode()


def _overlay_text(folder: SecurityFolder) -> bytes:
    lead = "# Put this into a run file, or set RELAX_BROKER__CREDENTIALS in the environment.\n"
    return f"{lead}[broker]\ncredentials = {orjson.dumps(str(folder.path)).decode()}\n".encode()


def _properties_text(folder: SecurityFolder) -> bytes:
    lead = [
        (
            "# For each broker of a cluster: add your listeners and advertised.listeners, named "
            "SASL_SSL (clients), INTERNAL (brokers)"
        ),
        (
            "# and CONTROLLER, and put the broker's own file of brokers/ and ca.pem where these "
            "two locations say."
        ),
    ]
    settings = build_broker_settings(folder, key_file=Path("/etc/kafka/broker.pem")) | {
        "ssl.truststore.location": "/etc/kafka/ca.pem"
    }
    return "\n".join([*lead, *(f"{key}={value}" for key, value in settings.items()), ""]).encode()


def admin_connection(config: RunConfig) -> Connection:
    """Return the connection that may create users and ACLs: of the folder's super user, or of
    `broker.username` when that is set.

    Raises:
        ConfigError: There is neither.
    """
    connection = Connection.from_config(config.broker, client_id=f"{config.run.id}.security")
    if config.broker.username:
        return connection
    return replace(connection, credentials=read_admin_settings(security_folder(config.broker)))


def security_folder(broker: BrokerConfig) -> SecurityFolder:
    """Return the run's security folder.

    Raises:
        ConfigError: broker.credentials is not set.
    """
    if broker.credentials is None:
        raise ConfigError(
            "broker.credentials is not set; make a folder with: relax broker secure CONFIG "
            "--out FOLDER, and name it there"
        )
    return SecurityFolder(broker.credentials.absolute())


def build_run_acls(config: RunConfig) -> list[Acl]:
    """Return all ACLs that the run's principals need."""
    return build_acls(config.run.id, source_run_id=config.parent.run)


def plan_security(config: RunConfig, connection: Connection) -> SecurityChanges:
    """Return the changes that `apply_security` would make."""
    prefix, folder = build_run_prefix(config.run.id), security_folder(config.broker)
    return PrincipalAdmin(connection).plan_changes(
        prefix, build_run_acls(config), folder.usernames(config.run.id)
    )


def plan_removal(run: RunSection, connection: Connection) -> SecurityChanges:
    """Return the users and ACLs that `remove_security` would remove from the cluster: all of the
    run.
    """
    return PrincipalAdmin(connection).plan_changes(build_run_prefix(run.id), [], [])


def remove_security(config: RunConfig, connection: Connection) -> list[Path]:
    """Remove the run's users and ACLs from the brokers, then its files from the folder; return the
    removed files.
    """
    changes = plan_removal(config.run, connection)
    no_passwords: dict[str, str] = {}
    PrincipalAdmin(connection).apply(changes, password_of=no_passwords.__getitem__)
    return security_folder(config.broker).delete_run(config.run.id)


def apply_security(config: RunConfig, connection: Connection) -> SecurityChanges:
    """Create the run's users and ACLs on the brokers; return the changes."""
    folder = security_folder(config.broker)
    changes = plan_security(config, connection)
    passwords = {
        user: read_secret(folder.password_file(user), key="broker.credentials")
        for user in changes.users
    }
    PrincipalAdmin(connection).apply(changes, password_of=passwords.__getitem__)
    return changes
