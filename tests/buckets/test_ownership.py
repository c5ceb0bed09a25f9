"""Whether a tensor is the only one on its memory."""

from __future__ import annotations

import torch

from dreamcomm import _C


def test_views_and_detached_tensors_are_users() -> None:
    whole = torch.ones(4, 4)
    assert _C.owns_memory(whole)
    for make in (torch.Tensor.detach, torch.Tensor.t, lambda one: one[0], lambda one: one.numpy()):
        view = make(whole)
        assert not _C.owns_memory(whole)
        del view
        assert _C.owns_memory(whole)


def test_a_storage_that_python_has_looked_at_is_no_user() -> None:
    whole = torch.ones(4, 4)
    whole.untyped_storage().data_ptr()
    assert _C.owns_memory(whole)
    kept = whole.untyped_storage()
    assert not _C.owns_memory(whole)
    del kept
    assert _C.owns_memory(whole)


def test_what_a_tensor_alone_is_a_view_of_is_no_user() -> None:
    whole = torch.ones(4, 4)
    view = whole.view(16)
    assert not _C.owns_memory(view)
    del whole
    assert _C.owns_memory(view)
    part = view[:4]
    assert not _C.owns_memory(view)
    del part
    assert _C.owns_memory(view)


def test_empty_and_sparse_tensors() -> None:
    assert _C.owns_memory(torch.empty(0))
    assert _C.owns_memory(torch.eye(3).to_sparse())
