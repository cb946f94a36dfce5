"""FedIvon, the client half: local epochs of IVON give a Gaussian over the weights (Pal et al. 2024, Algorithm 2)."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from torch.nn.functional import cross_entropy

from clients.base import LocalData, Told, TorchClient, Work, mean_loss
from fedivon_flwr.optim import Ivon, IvonSettings, write
from fedivon_flwr.posterior import DiagGaussian, Layout, barycentre
from fedivon_flwr.records import HESS, MEAN, NDArrays, flat, unflatten
from fedivon_flwr.settings import kebab


class Plan(Told):
    """What a FedIvon client is told besides IVON's settings."""

    prior: Literal["zero", "server"] = "zero"
    temperature: float = 1.0
    personalise: Literal["prior", "rkl", "w2"] = "prior"
    personal_weight: float = 0.5


def ivon_settings(config: Mapping[str, Any], examples: int) -> IvonSettings:
    """IVON's part of what a client with this many examples is told."""
    told = {name: config[kebab(name)] for name in IvonSettings.model_fields if kebab(name) in config}
    return IvonSettings(**{**told, "ess": float(examples)} if told.get("ess") == "local" else told)


def personal_arrays(
    model: nn.Module, arrays: NDArrays, data: LocalData, ivon: IvonSettings, temperature: float, work: Work
) -> NDArrays:
    """A site's personal posterior, for the wire: IVON on its data under a global posterior as prior."""
    told = {kebab(name): value for name, value in ivon.model_dump().items()}
    config = {**told, "prior": "server", "temperature": temperature, **work.model_dump(by_alias=True)}
    client = FedIvonClient(model, data)
    trained, _, _ = client.fit([arrays[key] for key in client.keys], {k: v for k, v in config.items() if v is not None})
    return dict(zip(client.keys, trained, strict=True))


class FedIvonClient(TorchClient):
    """Sends back mean and Hessian; the prior is zero-mean, or the server's posterior."""

    first_hess = 1.0

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:
        """IVON on the node's data."""
        plan, layout = Plan.model_validate(config), Layout.of(self.model)
        params = [p for p in self.model.parameters() if p.requires_grad]
        settings = ivon_settings(config, len(self.data.train))
        optimizer = Ivon(params, settings)
        if plan.prior == "server":
            optimizer.use_prior(flat(arrays, MEAN), flat(arrays, HESS), plan.temperature)
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
            self.memory |= trained
        return trained, mean_loss(losses)

    def personalise(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> DiagGaussian:
        """The local posterior under the server's as prior; or, without training, one between it and the client's last.

        The latter (a projection) is the barycentre of the two Gaussians, with the weight that the client is told for
        its own; a client that has never trained has the server's.
        """
        plan = Plan.model_validate(config)
        if plan.personalise == "prior":
            trained, _ = self.train(arrays, {**config, "prior": "server"}, work)
            return self.posterior(trained, config)
        ours, theirs = (self.posterior(part, config) for part in (arrays, self.memory or arrays))
        between = barycentre(ours, theirs, plan.personal_weight, plan.personalise)
        write([p for p in self.model.parameters() if p.requires_grad], between.mean)
        return between

    def posterior(self, arrays: NDArrays, config: Mapping[str, Any]) -> DiagGaussian:
        """The server's posterior, on the node's device."""
        settings = ivon_settings(config, len(self.data.train))
        mean, hess = (flat(arrays, prefix).to(self.device) for prefix in (MEAN, HESS))
        return DiagGaussian.from_hess(mean, hess, settings.ess, settings.weight_decay)
