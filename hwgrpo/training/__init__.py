"""The loop, the policy model, batch layouts, strategies, checkpoints."""

from hwgrpo.registry import Registry

LAYOUTS = Registry(
    "model.layout",
    {"padded": "hwgrpo.training.layouts:padded", "packed": "hwgrpo.training.layouts:packed"},
)
STRATEGIES = Registry(
    "trainer.strategy",
    {"single": "hwgrpo.training.strategies.single:Single", "ddp": "hwgrpo.training.strategies.ddp:Ddp"},
)
