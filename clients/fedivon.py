"""FedIvon, the client half: local epochs of IVON give a Gaussian over the weights (Pal et al. 2024, Algorithm 2)."""

from collections.abc import Mapping
from typing import Any, Literal

from torch.nn.functional import cross_entropy

from clients.base import Told, TorchClient, Work, mean_loss
from fedivon_flwr.optim import Ivon, IvonSettings
from fedivon_flwr.posterior import DiagGaussian, Layout
from fedivon_flwr.records import HESS, MEAN, NDArrays, flat, unflatten


class Plan(Told):
    """What a FedIvon client is told."""

    lr: float
    ess: float | Literal["local"]
    hess_init: float = 1.0
    weight_decay: float = 2e-4
    beta1: float = 0.9
    beta2: float = 0.99999
    mc_samples: int = 1
    prior: Literal["zero", "server"] = "zero"
    temperature: float = 1.0

    def ivon(self, examples: int) -> IvonSettings:
        """IVON's settings for a client with this many examples."""
        told = self.model_dump(exclude={"prior", "temperature"})
        return IvonSettings(**{**told, "ess": float(examples) if self.ess == "local" else self.ess})


class FedIvonClient(TorchClient):
    """Sends back mean and Hessian; the prior is zero-mean, or the server's posterior."""

    has_hess = True

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:
        """IVON on the node's data."""
        plan, layout = Plan.model_validate(config), Layout.of(self.model)
        params = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = Ivon(params, plan.ivon(len(self.data.train)))
        if plan.prior == "server":
            optimizer.use_prior(flat(arrays, MEAN), flat(arrays, HESS), plan.temperature)
        else:
            optimizer.start_at(flat(arrays, HESS))
        losses = []
        for inputs, labels in self.epochs(work):
            for _ in range(plan.mc_samples):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    loss = cross_entropy(self.model(inputs), labels)
                    loss.backward()  # type: ignore[no-untyped-call]
                losses.append((loss, len(labels)))
            optimizer.step()
        trained = unflatten(optimizer.mean(), layout, MEAN) | unflatten(optimizer.hess(), layout, HESS)
        return trained, mean_loss(losses)

    def posterior(self, arrays: NDArrays, config: Mapping[str, Any]) -> DiagGaussian:
        """The server's posterior, on the node's device."""
        plan = Plan.model_validate(config)
        mean, hess = (flat(arrays, prefix).to(self.device) for prefix in (MEAN, HESS))
        return DiagGaussian.from_hess(mean, hess, plan.ivon(len(self.data.train)).ess, plan.weight_decay)
