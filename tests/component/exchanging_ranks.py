"""The program of test_rank_exchange: four ranks, two data-parallel ones of two peers each, exchange
bytes in small pieces."""

import os
import socket
import sys

from relax_events.config.topology import Topology
from relax_events.training import distributed
from relax_events.training.distributed import open_ranks

NUM_RANKS = 4


def use_ranks(rank: int) -> None:
    """Join the others, and check what this rank receives."""
    with open_ranks(timeout_seconds=60, lay_out=lambda number: Topology.of(number, tensor=2)) as us:
        uneven = us.exchange_bytes([bytes([rank]) * (10 * rank + 7 * to) for to in range(us.size)])
        assert uneven == [bytes([by]) * (10 * by + 7 * rank) for by in range(us.size)]
        assert us.exchange_bytes([b""] * us.size) == [b""] * us.size
        one = us.exchange_bytes(
            [b"x" * 100 if (rank, to) == (0, 3) else b"" for to in range(us.size)]
        )
        assert one == [b"x" * 100 if (by, rank) == (0, 3) else b"" for by in range(us.size)]
        leads = us.at.is_data_leader
        assert us.share_with_peers(bytes([rank]) * 100 if leads else None) == (
            bytes([2 * us.at.data]) * 100
        )
        assert us.share_with_peers(b"" if leads else None) == b""


def main() -> int:
    """Fork the ranks; return 0 when all of them succeeded."""
    distributed.PIECE_BYTES = 40
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        os.environ |= {
            "WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        children = []
        for rank in range(NUM_RANKS):
            child = os.fork()
            if not child:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if rank == 0:  # the others connect to the listener that is passed to rank 0
                    os.environ["RELAX_RENDEZVOUS_FD"] = str(os.dup(listener.fileno()))
                try:
                    use_ranks(rank)
                except BaseException as error:
                    print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                    os._exit(1)
                os._exit(0)
            children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
