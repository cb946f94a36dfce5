"""What the server does: one file per method, each a Flower `Strategy`, named like its other half in `clients`."""

from typing import Any

from fedivon_flwr.errors import UserError
from fedivon_flwr.registry import Plugins, unknown
from fedivon_flwr.settings import Settings, validated
from strategies.base import FederatedStrategy, RoundSettings

STRATEGIES: Plugins[type[FederatedStrategy]] = Plugins(
    "method",
    "strategies",
    FederatedStrategy,  # type: ignore[type-abstract]
)


def build(settings: Settings) -> FederatedStrategy:
    """The strategy that the settings name, with its options."""
    kind = STRATEGIES[settings.method]
    for table in settings.options:
        if table not in STRATEGIES.names():
            key = next(iter(settings.options[table]))
            raise UserError(f"Unknown key '{table}.{key}': {unknown('method', table, STRATEGIES.names())}")
    options = validated(kind.options_type, settings.options.get(settings.method, {}), f"{settings.method}.")
    rounds = RoundSettings(
        clients_per_round=settings.clients_per_round,
        min_replies=settings.min_replies,
        deadline=settings.round_deadline,
        nodes=settings.clients,
        node_wait=settings.node_wait,
        evaluate_every=settings.evaluate_every if settings.evaluation == "clients" else 0,
        evaluate_clients=settings.clients_per_round,
        final_samples=settings.test_samples,
        unseen=settings.unseen_clients,
        seed=settings.seed,
    )
    strategy = kind(options, rounds)
    strategy.num_rounds = settings.rounds
    return strategy


def training(settings: Settings) -> dict[str, Any]:
    """The part of the settings that decides what is trained: those that matter after the last round are left out.

    All of them decide it where personal models need what the clients remember, unless that outlasts the run. An
    evaluation on the clients is a part of the last round.
    """
    strategy, identity = build(settings), settings.identity()
    if settings.personal and strategy.remembers and not settings.keep_memory:
        return identity
    late = {f"{settings.method}.{key}" for key in strategy.late_keys()}
    after = ("personal-",) if settings.evaluation == "clients" else ("personal-", "test-")
    late |= {key for key in identity if key.rpartition(".")[2].startswith(after)} | {"personal"}
    return {key: value for key, value in identity.items() if key not in late}


def complete(settings: Settings) -> Settings:
    """The settings with every option of their method, and of no other: what is shipped and written down."""
    options = build(settings).options.model_dump(by_alias=True)
    return settings.model_copy(update={"options": {settings.method: options}})
