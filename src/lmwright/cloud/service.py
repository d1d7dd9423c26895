"""Service: what the supervisor of a job asks of those who have slices.

    Slices --create, request, nodes, delete--> tpu_api.Tpus         queued resources
                                           '-> gke.cluster.Cluster  JobSets

States are those of queued resources. GONE is a request that is not there, and HOPELESS one whose
hosts cannot start for a reason that another request does not cure.
"""

from dataclasses import dataclass
from typing import Protocol

from lmwright.cloud.spec import Cloud, Offer
from lmwright.errors import TransientError


class Scarce(Exception):
    """There is no quota or no capacity in a zone; another may have some."""


class Away(TransientError):
    """The service is not reached, or cannot answer now."""


@dataclass(frozen=True)
class Request:
    """A request for slices, as the service shows it."""

    id: str
    state: str
    message: str = ""
    job: str = ""
    """Job that its label names; empty for requests that lmwright has not made."""
    url: str = ""
    """Folder of its job, where the service tells."""


@dataclass(frozen=True)
class Node:
    """A slice that was made for a request."""

    name: str
    state: str
    health: str
    message: str


class Service(Protocol):
    """Service that has slices. Every method raises UserError where the service refuses, and Away
    where it does not answer; `create` raises Scarce where there is too little."""

    cloud: Cloud

    def create(self, id: str, job: str, offer: Offer, metadata: dict[str, str]) -> None:
        """Asks for slices; done already if the request is there."""

    def request(self, zone: str, id: str) -> Request:
        """Status of a request."""

    def requests(self, zone: str) -> list[Request]:
        """All requests in a zone that lmwright has made."""

    def nodes(self, zone: str, id: str, num_slices: int) -> list[Node]:
        """The slices of a request that are there."""

    def delete(self, zone: str, id: str) -> None:
        """Deletes a request and its slices."""
