"""Applies a run's principals and ACLs to a cluster: creates missing and deletes surplus ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from relax_events.errors import BrokerUnavailable
from relax_events.kafka.connection import Connection, extract_error
from relax_events.kafka.security.acls import Acl
from relax_events.kafka.security.scram import ITERATIONS

USER = "User:"
ANY = "*"


@dataclass(frozen=True, slots=True)
class SecurityChanges:
    """The changes that give a cluster a run's principals and ACLs. Passwords can't be read back, so
    all users are set again.
    """

    users: list[str] = field(default_factory=list)
    unexpected_users: list[str] = field(default_factory=list)
    missing: list[Acl] = field(default_factory=list)
    surplus: list[Acl] = field(default_factory=list)


class PrincipalAdmin:
    """Reads and changes users and ACLs of a cluster as a super user; every call is bounded by the
    connection's request timeout.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._timeout_seconds = connection.request_timeout_seconds
        self._client = AdminClient(connection.settings())

    def plan_changes(
        self, prefix: str, acls: Sequence[Acl], users: Sequence[str]
    ) -> SecurityChanges:
        """Compare a cluster's users and ACLs with the run's.

        Args:
            prefix: The prefix of the run's user names.
            acls: All ACLs of the run.
            users: All users of the run.
        """
        current_acls = {acl for acl in self._acls() if acl.username.startswith(prefix)}
        unknown = [name for name in self._users() if name.startswith(prefix) and name not in users]
        return SecurityChanges(
            sorted(users),
            unknown,
            sorted(set(acls) - current_acls),
            sorted(current_acls - set(acls)),
        )

    def apply(self, changes: SecurityChanges, *, password_of: Callable[[str], str]) -> None:
        """Delete and create ACLs, then set passwords: no user can log in with surplus
        permissions.
        """
        if changes.surplus:
            self._wait(
                self._client.delete_acls([_filter(acl) for acl in changes.surplus]),
                "deleting ACLs",
            )
        if changes.missing:
            self._wait(
                self._client.create_acls([_binding(acl) for acl in changes.missing]),
                "adding ACLs",
            )
        alterations: list[Any] = [_upsertion(user, password_of(user)) for user in changes.users]
        alterations += [
            UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_512)
            for user in changes.unexpected_users
        ]
        if alterations:
            self._wait(self._client.alter_user_scram_credentials(alterations), "setting users")

    def _users(self) -> list[str]:
        described = self._result(self._client.describe_user_scram_credentials(), "listing users")
        return sorted(described)

    def _acls(self) -> list[Acl]:
        anything: Any = None  # the type stubs do not allow a filter without a name
        everything = AclBindingFilter(
            ResourceType.ANY,
            anything,
            ResourcePatternType.ANY,
            anything,
            anything,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        bindings = self._result(self._client.describe_acls(everything), "listing ACLs")
        return [_to_acl(binding) for binding in bindings if binding.principal.startswith(USER)]

    def _wait(self, futures: Mapping[Any, Any], what: str) -> None:
        for subject, future in futures.items():
            self._result(future, f"{what} of {getattr(subject, 'principal', subject)}")

    def _result(self, future: Any, what: str) -> Any:
        try:
            return future.result(self._timeout_seconds)
        except KafkaException as exception:
            raise self._connection.translate(extract_error(exception), what) from exception
        except TimeoutError:
            raise BrokerUnavailable(
                f"{what}: no response within {self._timeout_seconds:g} s"
            ) from None


def _binding(acl: Acl) -> AclBinding:
    return AclBinding(*_pattern(acl), AclPermissionType.ALLOW)


def _filter(acl: Acl) -> AclBindingFilter:
    return AclBindingFilter(*_pattern(acl), AclPermissionType.ALLOW)


def _pattern(acl: Acl) -> tuple[ResourceType, str, ResourcePatternType, str, str, AclOperation]:
    """Return the arguments that a binding and its filter share, in the client's order."""
    operation, pattern = (
        AclOperation[acl.operation.upper()],
        ResourcePatternType[acl.pattern.upper()],
    )
    return (
        ResourceType[acl.resource.upper()],
        acl.name,
        pattern,
        USER + acl.username,
        ANY,
        operation,
    )


def _to_acl(binding: Any) -> Acl:
    kind, pattern, operation = (
        value.name.lower()
        for value in (binding.restype, binding.resource_pattern_type, binding.operation)
    )
    return Acl(binding.principal.removeprefix(USER), kind, binding.name, pattern, operation)


def _upsertion(user: str, password: str) -> UserScramCredentialUpsertion:
    return UserScramCredentialUpsertion(
        user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, ITERATIONS), password.encode()
    )
