"""The thin Flower ServerApp: run what the run config says."""

from logging import ERROR

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedivon_flwr.errors import UserError
from fedivon_flwr.settings import Settings
from simulation.federation import run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run; what a user did wrong is logged as one sentence."""
    try:
        run(grid, Settings.from_config(context.run_config))
    except UserError as error:
        log(ERROR, "%s", error)
        raise
