"""Child processes for everything that touches foreign bytes or runs foreign code.

pool         ChildPool: requests with a deadline each, to children that are started again
driver       the one thread of a process that reads, writes, and watches all its children
child        one child process: its pipes, its requests, and how it ends
frames       the format of requests and responses
served       the child's side
profiles     what a child may touch: pure, network, program, trusted
launch       confines a process, then runs its module
entry_points the list of all places where foreign bytes enter, each with its profile
"""

from relax_events.confinement.pool import ChildPool
from relax_events.confinement.profiles import Confinement, Profile
from relax_events.confinement.requests import ChildLost, Reply
from relax_events.confinement.settings import ChildSettings

__all__ = ["ChildLost", "ChildPool", "ChildSettings", "Confinement", "Profile", "Reply"]
