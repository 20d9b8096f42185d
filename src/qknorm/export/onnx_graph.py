"""ONNX graphs written node by node: operations by name in, tensors by name out, weights kept once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qknorm.errors import InputError
from qknorm.version import __version__

OPSET = 18
"""Of ONNX; ONNX Runtime reads it from 1.14 on."""
IR_VERSION = 9
FLOAT, UINT8, DOUBLE = 1, 2, 11
"""Types, as ONNX numbers them."""
LARGEST = 2_000_000_000
"""Bytes of weights in a file."""

Axis = int | str
"""A size, or the name of one that is known when the graph runs."""


def import_onnx() -> Any:
    """The package onnx, or a sentence on how to get it."""
    try:
        import onnx
    except ImportError:
        raise InputError(
            "exporting to ONNX needs the packages onnx and onnxruntime; get them with pip install 'qknorm[onnx]'"
        ) from None
    return onnx


class Graph:
    """A graph in the making; a tensor in it is its name. `int8` asks for linear layers in 8-bit integers."""

    def __init__(self, name: str, *, int8: bool = False) -> None:
        self._onnx = import_onnx()
        self.int8 = int8
        self._name = name
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._weights: dict[str, Any] = {}
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def input(self, name: str, dtype: Any, shape: Sequence[Axis]) -> str:
        """A tensor that whoever runs the graph gives."""
        self._inputs.append(self._described(name, dtype, shape))
        return name

    def output(self, tensor: str, name: str, dtype: Any, shape: Sequence[Axis]) -> None:
        """A tensor that whoever runs the graph gets, under this name."""
        self._nodes.append(self._onnx.helper.make_node("Identity", [tensor], [name], name=f"{name}_out"))
        self._outputs.append(self._described(name, dtype, shape))

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """A tensor of fixed numbers; equal ones are stored once."""
        array: NDArray[Any] = np.array(value, dtype=dtype, order="C")
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = f"constant_{len(self._weights)}"
            self._weights[self._known[key]] = self._onnx.numpy_helper.from_array(array, self._known[key])
        return self._known[key]

    def indices(self, *values: int) -> str:
        """A list of whole numbers, as shapes and axes are given."""
        return self.constant(values, np.int64)

    def add(self, operation: str, *inputs: str, **attributes: Any) -> str:
        """The result of an operation with one output."""
        return self.add_many(operation, 1, *inputs, **attributes)[0]

    def add_many(self, operation: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        """The results of an operation with several outputs."""
        number = len(self._nodes)
        names = [f"{operation.lower()}_{number}" + (f"_{i}" if outputs > 1 else "") for i in range(outputs)]
        node = self._onnx.helper.make_node(operation, list(inputs), names, name=f"{operation}_{number}", **attributes)
        self._nodes.append(node)
        return names

    def model(self) -> Any:
        """The graph as ONNX has it, checked."""
        helper = self._onnx.helper
        if sum(len(weight.raw_data) for weight in self._weights.values()) > LARGEST:
            raise InputError(f"the {self._name} is larger than the 2 GB that an ONNX file can hold; export it as int8")
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, list(self._weights.values()))
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="qknorm",
            producer_version=__version__,
        )
        self._onnx.checker.check_model(model, full_check=True)
        return model

    def save(self, path: Path) -> None:
        """Writes the graph."""
        self._onnx.save(self.model(), str(path))

    def _described(self, name: str, dtype: Any, shape: Sequence[Axis]) -> Any:
        kind = self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self._onnx.helper.make_tensor_value_info(name, kind, list(shape))
