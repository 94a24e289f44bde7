"""Other projects' kernels, where they are installed: one file each, all called through `Peer`.

peer.py                interface of an adapter
trl.py                 TRL's chunked head
liger.py               Liger-Kernel's scaled cross-entropy, its Triton cross-entropy and its fused GRPO loss
cut_cross_entropy.py   Apple's cut-cross-entropy
verl.py                verl's linear_cross_entropy
"""

from hwgrpo.bench.kernels.peers import cut_cross_entropy, liger, trl, verl
from hwgrpo.bench.kernels.peers.peer import Peer

PEERS: tuple[Peer, ...] = (trl.CHUNKED, liger.SCALED, liger.TRITON, liger.GRPO, cut_cross_entropy.CCE, verl.LINEAR)

__all__ = ["PEERS", "Peer"]
