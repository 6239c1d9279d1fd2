"""Dynamo's vLLM worker on a machine without torchvision.

``python -m tests.sdk.connectors.dynamo.vllm_worker`` takes the arguments of ``python -m dynamo.vllm``. The
worker imports a function for the sizes of images, from a module that needs torchvision. torchvision has no
build for the tests' torch. The function here refuses, because the tests' model has no images.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import NoReturn

NEEDS_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


def smart_resize(*_: object, **__: object) -> NoReturn:
    """Refuse images."""
    raise NotImplementedError("images need torchvision")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")  # as dynamo.vllm does
    module = ModuleType(NEEDS_TORCHVISION)
    module.__dict__["smart_resize"] = smart_resize
    sys.modules[NEEDS_TORCHVISION] = module

    from dynamo.vllm.main import main

    main()
