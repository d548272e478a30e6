"""The security page lists the effect of a forged record for every role and topic; the ACLs in the
code equal its table.
"""

from __future__ import annotations

from acls_table import writes_by_page

from relax_events.kafka.security.acls import build_acls, list_writable_topics
from relax_events.topics.names import DEAD_LETTER_ROLES, ROLES


def test_docs_page_lists_the_writable_topics_of_each_role() -> None:
    assert writes_by_page(ROLES, with_dead_letters=DEAD_LETTER_ROLES) == {
        role: set(list_writable_topics(role)) for role in ROLES
    }


def test_write_acls_are_literal_and_match_the_writable_topics() -> None:
    granted: dict[str, set[str]] = {role: set() for role in ROLES}
    for acl in build_acls("r"):
        role = acl.username.removeprefix("relax.r.")
        if role in granted and (acl.resource, acl.operation) == ("topic", "write"):
            assert acl.pattern == "literal"
            granted[role].add(acl.name.removeprefix("relax.r."))
    assert granted == {role: set(list_writable_topics(role)) for role in ROLES}
