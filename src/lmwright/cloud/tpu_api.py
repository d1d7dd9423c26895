"""TPU slices through the Cloud TPU API (queued resources, v2), by Google's client over REST.

    create --> WAITING_FOR_RESOURCES --> PROVISIONING --> ACTIVE --> SUSPENDED | FAILED | deleted

A request that is SUSPENDED is never served again, and one that FAILED stays until it is deleted.
gcloud's own variables lead to another endpoint:

    CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU=http://127.0.0.1:8080/
    CLOUDSDK_AUTH_DISABLE_CREDENTIALS=true
"""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from lmwright.cloud.disk_names import source_of
from lmwright.cloud.service import Away, Node, Request, Scarce
from lmwright.cloud.spec import Cloud, Offer
from lmwright.cloud.stage import STARTUP
from lmwright.errors import UserError, first_line, install
from lmwright.storage.bucket import token_may_come

ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"
NO_CREDENTIALS = "CLOUDSDK_AUTH_DISABLE_CREDENTIALS"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LABEL = "lmwright-job"
TIMEOUT_S = 60.0
RATE = re.compile(r"per (second|minute|hour)|[Rr]ate limit|RATE_LIMIT", re.ASCII)
BUSY = ("FAILED_PRECONDITION", "ABORTED", "ALREADY_EXISTS")


class Tpus:
    """The TPU service of a project. Every method raises UserError where it refuses, and Away where
    it does not answer; `create` raises Scarce where there is no quota or no capacity."""

    def __init__(self, cloud: Cloud):
        self.cloud = cloud
        self._client = _client(cloud.project)

    def create(self, id: str, job: str, offer: Offer, metadata: dict[str, str]) -> None:
        """Asks for slices; done already if the request is there."""
        from google.api_core.exceptions import Conflict
        from google.cloud import tpu_v2

        metadata = {"startup-script": STARTUP.read_text()} | metadata
        once = metadata.get("lmwright-request") or f"{self._parent(offer.zone)}/{id}"
        request = tpu_v2.CreateQueuedResourceRequest(
            parent=self._parent(offer.zone),
            queued_resource_id=id,
            queued_resource=queued_resource(self.cloud, id, job, offer, metadata),
            request_id=str(uuid.uuid5(uuid.NAMESPACE_URL, once)),
        )
        with self._told(f"a slice {offer.name} in {offer.zone}", making=True):
            try:
                self._client.create_queued_resource(request, timeout=TIMEOUT_S)
            except Conflict as error:
                if _status(error) != "ALREADY_EXISTS":
                    raise

    def request(self, zone: str, id: str) -> Request:
        """Status of a request."""
        from google.api_core.exceptions import NotFound

        name = f"{self._parent(zone)}/queuedResources/{id}"
        with self._told(f"request {id} in {zone}"):
            try:
                return _request(self._client.get_queued_resource(name=name, timeout=TIMEOUT_S))
            except NotFound:
                return Request(id, "GONE")

    def requests(self, zone: str) -> list[Request]:
        """All requests in a zone that lmwright has made."""
        with self._told(f"the requests in {zone}"):
            pages = self._client.list_queued_resources(parent=self._parent(zone), timeout=TIMEOUT_S)
            return [request for request in map(_request, pages) if request.job]

    def nodes(self, zone: str, id: str, num_slices: int) -> list[Node]:
        """The slices of a request that are there."""
        from google.api_core.exceptions import NotFound

        names = [id] if num_slices == 1 else [f"{id}-{k}" for k in range(num_slices)]
        nodes = []
        for name in names:
            with self._told(f"slice {name} in {zone}"):
                try:
                    path = f"{self._parent(zone)}/nodes/{name}"
                    node = self._client.get_node(name=path, timeout=TIMEOUT_S)
                except NotFound:
                    continue
            health = node.health.name.removeprefix("HEALTH_")
            nodes.append(Node(name, node.state.name, health, node.health_description))
        return nodes

    def delete(self, zone: str, id: str) -> None:
        """Deletes a request and its slices. One that is changing just now may have to be told
        again."""
        from google.api_core.exceptions import BadRequest, Conflict, NotFound
        from google.cloud import tpu_v2

        name = f"{self._parent(zone)}/queuedResources/{id}"
        request = tpu_v2.DeleteQueuedResourceRequest(name=name, force=True)
        with self._told(f"request {id} in {zone}"):
            try:
                self._client.delete_queued_resource(request, timeout=TIMEOUT_S)
            except NotFound:
                return
            except (BadRequest, Conflict) as error:
                if _status(error) not in BUSY:
                    raise

    def accelerator_types(self, zone: str) -> set[str]:
        """Slices that a zone has."""
        with self._told(f"the slices of {zone}"):
            pages = self._client.list_accelerator_types(
                parent=self._parent(zone), timeout=TIMEOUT_S
            )
            return {entry.type_ for entry in pages}

    def runtimes(self, zone: str) -> set[str]:
        """Runtime versions that a zone has."""
        with self._told(f"the runtime versions of {zone}"):
            pages = self._client.list_runtime_versions(parent=self._parent(zone), timeout=TIMEOUT_S)
            return {entry.version for entry in pages}

    def _parent(self, zone: str) -> str:
        return f"projects/{self.cloud.project}/locations/{zone}"

    @contextmanager
    def _told(self, thing: str, *, making: bool = False) -> Iterator[None]:
        """Turns the client's exceptions into sentences."""
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError, TransportError
        from requests.exceptions import RequestException

        project = self.cloud.project
        try:
            yield
        except exceptions.TooManyRequests as error:
            reason = _reason(error)
            if making and not RATE.search(reason):
                raise Scarce(f"{thing}: {reason}") from error
            raise Away(f"{thing}: the service wants fewer requests ({reason})") from error
        except (exceptions.ServerError, exceptions.Conflict) as error:
            raise Away(f"{thing}: the service cannot answer now ({_reason(error)})") from error
        except (exceptions.RetryError, RequestException, TransportError) as error:
            kind = type(error).__name__
            raise Away(
                f"{thing}: the service is not reached ({kind}); check the network"
            ) from error
        except (exceptions.Forbidden, exceptions.Unauthorized) as error:
            raise UserError(
                f"{thing}: project {project} refuses it ({_reason(error)}); the account needs the "
                "role roles/tpu.admin there, and the TPU API has to be enabled"
            ) from error
        except exceptions.BadRequest as error:
            raise UserError(f"{thing}: the service refuses it: {_reason(error)}") from error
        except exceptions.NotFound as error:
            raise UserError(f"{thing}: {_reason(error)}; check --project and --zone") from error
        except exceptions.GoogleAPICallError as error:  # 408 and the like
            raise Away(f"{thing}: the service cannot answer now ({_reason(error)})") from error
        except GoogleAuthError as error:
            if token_may_come(error):
                raise Away(f"{thing}: there is no token now ({first_line(error):.200})") from error
            raise UserError(
                f"{thing}: no valid credentials; run: gcloud auth application-default login"
            ) from error


def _status(error: Any) -> str:
    """The service's word for a refusal, as in FAILED_PRECONDITION: over REST the client has one
    exception for several of them."""
    try:
        return error.response.json()["error"]["status"]
    except (AttributeError, ValueError, KeyError, TypeError):
        return ""


def _reason(error: Any) -> str:
    """The service's own words, without the request around them."""
    try:
        return error.response.json()["error"]["message"]
    except (AttributeError, ValueError, KeyError, TypeError):
        return error.message


def queued_resource(cloud: Cloud, id: str, job: str, offer: Offer, metadata: dict[str, str]) -> Any:
    """A request as the service takes it."""
    from google.cloud import tpu_v2
    from google.protobuf import duration_pb2

    node = tpu_v2.Node(
        runtime_version=offer.runtime,
        network_config=tpu_v2.NetworkConfig(
            network=cloud.network,
            subnetwork=cloud.subnetwork,
            enable_external_ips=cloud.external_ips,
        ),
        service_account=tpu_v2.ServiceAccount(email=cloud.service_account, scope=[SCOPE]),
        metadata=metadata,
        labels={LABEL: job},
        data_disks=[
            tpu_v2.AttachedDisk(
                source_disk=source_of(disk, cloud.project, offer.zone),
                mode=tpu_v2.AttachedDisk.DiskMode.READ_ONLY,
            )
            for disk in cloud.disks
        ],
    )
    if offer.topology:
        kind = tpu_v2.AcceleratorConfig.Type[offer.accelerator_type]
        node.accelerator_config = tpu_v2.AcceleratorConfig(type_=kind, topology=offer.topology)
    else:
        node.accelerator_type = offer.accelerator_type
    spec: dict[str, Any] = {
        "parent": f"projects/{cloud.project}/locations/{offer.zone}",
        "node": node,
    }
    if offer.num_slices > 1:
        spec["multislice_params"] = {"node_count": offer.num_slices, "node_id_prefix": id}
    else:
        spec["node_id"] = id
    resource = tpu_v2.QueuedResource(tpu={"node_spec": [spec]})
    if cloud.capacity == "spot":
        resource.spot = tpu_v2.QueuedResource.Spot()
    elif cloud.capacity == "guaranteed":
        resource.guaranteed = tpu_v2.QueuedResource.Guaranteed()
    elif cloud.capacity == "reserved":  # "-" stands for any reservation of the project there
        name = cloud.reservation or "-"
        parent = f"projects/{cloud.project}/locations/{offer.zone}/reservations"
        resource.reservation_name = name if "/" in name else f"{parent}/{name}"
    if cloud.valid_hours:
        wait = duration_pb2.Duration(seconds=int(cloud.valid_hours * 3600))
        resource.queueing_policy = {"valid_until_duration": wait}
    return resource


def _request(resource: Any) -> Request:
    state = resource.state
    message = state.failed_data.error.message if "failed_data" in state else ""
    specs = resource.tpu.node_spec
    node = specs[0].node if specs else None
    job = node.labels.get(LABEL, "") if node else ""
    url = node.metadata.get("lmwright-job", "") if node else ""
    return Request(resource.name.rpartition("/")[2], state.state.name, message, job, url)


def _client(project: str) -> Any:
    """Google's client; raises UserError where it is not installed or has no credentials."""
    try:
        from google.cloud.tpu_v2 import TpuClient
        from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport
    except ImportError:
        raise UserError(
            f"--on: slices need the package google-cloud-tpu; {install('cloud')}"
        ) from None
    options: dict[str, Any] = {}
    if endpoint := os.environ.get(ENDPOINT):
        place = urlsplit(endpoint)
        options = {"host": place.netloc, "url_scheme": place.scheme}
    try:
        options["credentials"] = credentials_for(project)
    except UserError as error:
        raise error.at("--on") from None
    return TpuClient(transport=TpuRestTransport(**options))


def credentials_for(project: str) -> Any:
    """This machine's credentials. A person's are charged to `project`: those of `gcloud auth
    application-default login` name no project of their own, and are refused without one. Raises
    UserError where there are none."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError
    from google.oauth2.credentials import Credentials

    if os.environ.get(NO_CREDENTIALS, "").lower() in ("1", "true"):
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
    try:
        found, _ = google.auth.default(scopes=[SCOPE])
    except DefaultCredentialsError:
        raise UserError(
            "there are no Google Cloud credentials here; run: gcloud auth application-default login"
        ) from None
    if isinstance(found, Credentials) and not found.quota_project_id:
        return found.with_quota_project(project)  # type: ignore[no-untyped-call]
    return found
