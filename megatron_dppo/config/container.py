"""The section ``[agent.container]``."""

from typing import get_args

from pydantic import Field

from megatron_dppo.config.section import ContainerTool, Section

CONTAINER_TOOLS: tuple[str, ...] = get_args(ContainerTool)
"""Values of ``agent.isolation`` that start each program in a container."""
ENDPOINT_NETWORK = "endpoint"


class ContainerConfig(Section):
    """A container for each episode, with ``agent.isolation`` = ``podman``, ``docker`` or ``apptainer``."""

    image: str | None = None
    """Image of the containers, which must exist: none is pulled. For apptainer the path of a file or folder. null: each
    data row names its image."""
    image_column: str | None = None
    """Column of the data row that names its image. Rows without it use ``image``."""
    network: str = ENDPOINT_NETWORK
    """``endpoint``: a network that reaches the run's endpoint and nothing else. It needs podman, and root. Any other
    value is that of the tool's ``--network``, such as ``host``, and must reach ``agent.host``. With apptainer only
    ``host``."""
    user: str = "65534:65534"
    """User and group of the program in the container. Empty: those of the image, which are often root. Not with
    apptainer, where the user is that of the trainer."""
    read_only: bool = False
    """Mount the image read-only, with an empty ``/tmp``."""
    max_cpus: float | None = Field(None, gt=0)
    """Maximum number of CPUs that a container uses at a time. null sets no limit."""
    max_processes: int = Field(512, gt=0)
    """Maximum number of processes and threads of a container."""
    options: list[str] = Field(default_factory=list)
    """Further options of the tool, such as ``--volume=/data/agent:/agent:ro``. They come last, so they can undo what
    the run sets."""
