"""FedIvon, the client half: local epochs of IVON give a Gaussian over the weights (Pal et al. 2024, Algorithm 2)."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from clients.base import LocalData, Told, TorchClient, Work, mean_loss
from fedivon_flwr.optim import Ivon, IvonSettings, to_its_end, write
from fedivon_flwr.posterior import DiagGaussian, Layout, barycentre
from fedivon_flwr.records import HESS, MEAN, NDArrays, flat, unflatten
from fedivon_flwr.settings import kebab

ESS = "ess"  # λ of the posterior that is remembered


class Plan(Told):
    """What a FedIvon client is told besides IVON's settings."""

    prior: Literal["zero", "server"] = "zero"
    temperature: float = 1.0
    local_ess: bool = False  # λ is the number of this client's examples, and `ess` that of the server's posterior
    test_ess: float = 0.0  # λ of the posterior that predicts; 0: `ess`
    personalise: Literal["prior", "rkl", "w2"] = "prior"
    personal_weight: float = 0.5


def ivon_settings(config: Mapping[str, Any], examples: int) -> IvonSettings:
    """IVON's part of what a client with this many examples is told."""
    told = {name: config[kebab(name)] for name in IvonSettings.model_fields if kebab(name) in config}
    return IvonSettings(**{**told, "ess": float(examples)} if told.get("ess") == "local" else told)


def strength(plan: Plan, ess: float, examples: int) -> float:
    """β, the strength of the server's posterior as prior.

    Where λ is the number ``N`` of the client's examples and the server's posterior has another one, ``λ̃``,
    ``β/N KL(q ‖ p)`` is ``(β λ̃/N)/λ̃ KL(q ‖ p)``.
    """
    return to_its_end(plan.temperature * (ess / examples if plan.local_ess else 1.0))


def personal_arrays(model: nn.Module, arrays: NDArrays, data: LocalData, config: Mapping[str, Any]) -> NDArrays:
    """A site's personal posterior, for the wire: as in the run, IVON under the global one as prior, or a projection."""
    client, plan, config = FedIvonClient(model, data), Plan.model_validate(config), dict(config)
    settings = ivon_settings(config, len(data.train))
    if plan.personalise == "prior":
        config["prior"] = "server"
    trained, _, _ = client.fit([arrays[key] for key in client.keys], config)
    found = dict(zip(client.keys, trained, strict=True))
    if plan.personalise != "prior":
        between, layout = client.projection(arrays, config), Layout.of(model)
        hess = between.precision / (plan.test_ess or config["ess"]) - settings.weight_decay
        return found | unflatten(between.mean, layout, MEAN) | unflatten(hess, layout, HESS)
    if strength(plan, settings.ess, len(data.train)) == 0:  # the limit has no width
        return {key: array for key, array in found.items() if not key.startswith(HESS)}
    return found


class FedIvonClient(TorchClient):
    """Sends back mean and Hessian; the prior is zero-mean, or the server's posterior."""

    first_hess = 1.0

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:
        """IVON on the node's data."""
        plan, layout = Plan.model_validate(config), Layout.of(self.model)
        params = [p for p in self.model.parameters() if p.requires_grad]
        settings = ivon_settings(config, len(self.data.train))
        if plan.local_ess and plan.prior == "zero":  # then the λ that the client was told is the server's
            settings = settings.model_copy(update={"ess": float(len(self.data.train))})
        optimizer = Ivon(params, settings)
        if plan.prior == "server":
            beta = strength(plan, settings.ess, len(self.data.train))
            optimizer.use_prior(flat(arrays, MEAN), flat(arrays, HESS), beta)
        else:
            optimizer.start_at(flat(arrays, HESS))
        losses = []
        for inputs, labels in self.epochs(work):
            for _ in range(settings.mc_samples):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    loss = cross_entropy(self.model(inputs), labels)
                    loss.backward()  # type: ignore[no-untyped-call]
                losses.append((loss.detach(), len(labels)))
            optimizer.step()
        trained = unflatten(optimizer.mean(), layout, MEAN) | unflatten(optimizer.hess(), layout, HESS)
        if plan.personalise != "prior":
            self.memory |= trained | {ESS: np.array(settings.ess, np.float32)}
        return trained, mean_loss(losses)

    def personalise(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> DiagGaussian | None:
        """The local posterior under the server's as prior; or, without training, one between it and the client's last.

        The latter (a projection) is the barycentre of the two Gaussians, with the weight that the client is told for
        its own; a client that has never trained has the server's.
        """
        plan, examples = Plan.model_validate(config), len(self.data.train)
        if plan.personalise == "prior":
            trained, _ = self.train(arrays, {**config, "prior": "server"}, work)
            beta = strength(plan, ivon_settings(config, examples).ess, examples)
            return self.posterior(trained, config) if beta else None  # β = 0: the limit has no width
        between = self.projection(arrays, config)
        write([p for p in self.model.parameters() if p.requires_grad], between.mean)
        return between

    def projection(self, arrays: NDArrays, config: Mapping[str, Any]) -> DiagGaussian:
        """The barycentre of the server's posterior and the client's last."""
        plan = Plan.model_validate(config)
        theirs = ours = self.posterior(arrays, config)
        if self.memory:
            ess = float(self.memory[ESS])
            scaled = {"ess": ess, "test-ess": plan.test_ess * ess / config["ess"]}
            ours = self.posterior(self.memory, {**config, **scaled})
        assert plan.personalise != "prior"
        return barycentre(theirs, ours, plan.personal_weight, plan.personalise)

    def posterior(self, arrays: NDArrays, config: Mapping[str, Any]) -> DiagGaussian:
        """The Gaussian that predicts, on the node's device."""
        settings = ivon_settings(config, len(self.data.train))
        mean, hess = (flat(arrays, prefix).to(self.device) for prefix in (MEAN, HESS))
        ess = Plan.model_validate(config).test_ess or settings.ess
        return DiagGaussian.from_hess(mean, hess, ess, settings.weight_decay)
