"""Rules of decompositions, solves and Fourier transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.lax import linalg

from tests.cases import examples
from tests.partition.rules.harness import check, normals, rules_of, seeds
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh

CLOSE = {"rtol": 2e-4, "atol": 2e-5}

batches = st.sampled_from([(), (8,), (3,), (2, 8), (8, 6)])


def _symmetric(shape, seed):
    matrix = normals(shape, seed)
    return matrix @ np.swapaxes(matrix, -1, -2) + 4 * np.eye(shape[-1], dtype=np.float32)


def _tall(shape, seed):
    return normals((*shape[:-2], shape[-2] + 2, shape[-1]), seed)


DECOMPOSITIONS = {
    "cholesky": (linalg.cholesky, _symmetric),
    "eigh": (linalg.eigh, _symmetric),
    "eig": (lambda x: linalg.eig(x, compute_left_eigenvectors=False), _symmetric),
    "svd": (linalg.svd, _tall),
    "qr": (lambda x: linalg.qr(x, full_matrices=False), _tall),
    "geqrf": (lambda x: jnp.linalg.qr(x, mode="raw"), _tall),
    "lu": (linalg.lu, normals),
    "schur": (linalg.schur, _symmetric),
    "hessenberg": (linalg.hessenberg, normals),
    "tridiagonal": (linalg.tridiagonal, _symmetric),
}


@pytest.mark.parametrize("batch", [(8,), (2, 4)])
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions(name, batch):
    function, draw = DECOMPOSITIONS[name]
    check(function, draw((*batch, 4, 4), len(name)), primitives=[name], **CLOSE)


def test_products_with_the_factors():
    a, taus = jnp.linalg.qr(normals((8, 4, 3), 0), mode="raw")
    check(linalg.householder_product, np.swapaxes(a, -1, -2), taus, primitives=["householder_product"], **CLOSE)
    check(
        lambda x: linalg.lu_pivots_to_permutation(linalg.lu(x)[1], 5),
        normals((8, 5, 3), 0),
        primitives=["lu_pivots_to_permutation"],
    )
    check(linalg.cholesky_update, normals((3, 3), 0), normals((3,), 1), primitives=["cholesky_update"], **CLOSE)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("pivoting", [True, False])
def test_multiplying_by_q(left, pivoting):
    a = normals((2, 4, 3), 0)
    c = normals((2, 3, 8) if left else (2, 8, 4), 1)
    mode = "left" if left else "right"
    check(
        lambda a, c: jax.scipy.linalg.qr_multiply(a, c, mode=mode, pivoting=pivoting),
        a,
        c,
        primitives=["ormqr", *(["geqp3"] if pivoting else ["geqrf"])],
        **CLOSE,
    )


@examples(10)
@given(batches, seeds, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from((1, 8, 16)))
def test_triangular_solve(batch, seed, left, lower, transpose, unit, columns):
    a = _symmetric((*batch, 4, 4), seed)
    b = normals((*batch, 4, columns) if left else (*batch, columns, 4), seed + 1)
    check(
        lambda a, b: linalg.triangular_solve(
            a, b, left_side=left, lower=lower, transpose_a=transpose, unit_diagonal=unit
        ),
        a,
        b,
        primitives=["triangular_solve"],
        rtol=1e-2,
        atol=1e-3,
    )


@examples(6)
@given(batches, seeds, st.sampled_from((1, 8)))
def test_tridiagonal_solve(batch, seed, columns):
    lower, upper = normals((*batch, 4), seed), normals((*batch, 4), seed + 1)
    diagonal = 9 + normals((*batch, 4), seed + 2)
    b = normals((*batch, 4, columns), seed + 3)
    check(linalg.tridiagonal_solve, lower, diagonal, upper, b, primitives=["tridiagonal_solve"], **CLOSE)


@pytest.mark.parametrize("batch", [(), (8,), (3,)])
def test_symmetric_product(batch):
    a, c = normals((*batch, 3, 8), 0), _symmetric((*batch, 3, 3), 1)
    check(
        lambda a, c: linalg.symmetric_product(a, c, alpha=2.0, beta=3.0, symmetrize_output=True),
        a,
        c,
        primitives=["symmetric_product"],
        **CLOSE,
    )


@pytest.mark.parametrize("batch", [(8,), (2, 4), (3,)])
@pytest.mark.parametrize("transform", [jnp.fft.fft, jnp.fft.ifft2, jnp.fft.rfft2, jnp.fft.irfft])
def test_fft(transform, batch):
    x = normals((*batch, 4, 6), 0)
    if transform is not jnp.fft.rfft2:
        x = x + 1j * normals(x.shape, 1)
    check(transform, x.astype(np.complex64) if np.iscomplexobj(x) else x, primitives=["fft"], **CLOSE)


def test_matrices_are_never_split():
    a, b = np.ones((8, 16, 16), np.float32), np.ones((8, 16, 32), np.float32)
    ((_, rule),) = rules_of(linalg.lu, a, primitive="lu")
    assert splittable(rule) == ([{0}], [{0}, {0}, {0}])
    ((_, rule),) = rules_of(linalg.cholesky, a[:3], primitive="cholesky")
    assert splittable(rule) == ([set()], [set()])
    ((_, rule),) = rules_of(
        lambda a, b: linalg.triangular_solve(a, b, left_side=True), a, b, primitive="triangular_solve"
    )
    assert splittable(rule) == ([{0}, {0, 2}], [{0, 2}])
    ((_, rule),) = rules_of(jnp.fft.rfft2, b, primitive="fft")
    assert splittable(rule) == ([{0}], [{0}])
