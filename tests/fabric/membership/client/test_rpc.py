from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import ostraca_fabric
from ostraca_fabric.membership.etcd.client import rpc_pb2


@pytest.mark.skipif(not find_spec("grpc_tools"), reason="grpcio-tools, which makes messages, is not here")
def test_the_messages_committed_are_those_of_the_proto_file(tmp_path: Path) -> None:
    """Whatever makes them: newer tools make another module of the same messages."""
    root, proto = Path(ostraca_fabric.__file__).parents[1], "ostraca_fabric/membership/etcd/client/rpc.proto"
    made = tmp_path / "made"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--descriptor_set_out={made}", proto],
        check=True,
    )
    (fresh,) = FileDescriptorSet.FromString(made.read_bytes()).file
    for message in fresh.message_type:
        for field in message.field:
            field.ClearField("json_name")
    assert fresh == FileDescriptorProto.FromString(rpc_pb2.DESCRIPTOR.serialized_pb)


def test_the_messages_stand_beside_those_of_any_other_etcd_client() -> None:
    assert rpc_pb2.DESCRIPTOR.package == "ostraca.etcd"
    assert {
        message.full_name.rpartition(".")[0] for message in rpc_pb2.DESCRIPTOR.message_types_by_name.values()
    } == {"ostraca.etcd"}
