from __future__ import annotations

import numpy as np
import pytest
import torch

from sfu.data.split import ForgetSplit
from sfu.evaluation.attacks.design import make_design

RNG = np.random.default_rng(0)


def split_of(forget, n_train):
    forget = torch.as_tensor(np.sort(forget))
    keep = torch.ones(n_train, dtype=torch.bool)
    keep[forget] = False
    return ForgetSplit(forget, keep.nonzero().squeeze(1), "fraction")


def labels(count, classes=3):
    return torch.from_numpy(RNG.permutation(np.arange(count) % classes))


def check(design, train, test, split):
    """What holds of every design: sizes, halves, and rows that are used once."""
    n_train, n_forget = len(train), len(split.forget_F)
    pool = torch.cat([train, test])
    members, others = design.targets_T[design.member_T], design.targets_T[~design.member_T]
    assert set(members.tolist()) <= set(split.forget_F.tolist())
    assert bool((others >= n_train).all())
    assert pool[members].bincount(minlength=3).tolist() == pool[others].bincount(minlength=3).tolist()
    for shadow in range(design.n_shadows):
        forgotten, retained = torch.cat(design.forgotten(shadow)), design.retained(shadow)
        used = torch.cat([forgotten, retained])
        assert len(forgotten) == n_forget
        assert len(retained) == len(split.retain_R)
        assert len(used.unique()) == len(used)
        seen = torch.isin(design.targets_T, used).numpy()
        assert (seen == design.inside_ST[shadow]).all()  # a target is forgotten, or was never seen
        assert set(pool[forgotten].tolist()) <= set(train[split.forget_F].tolist())


def test_every_target_is_forgotten_by_half_of_the_shadows_and_never_seen_by_the_others():
    train, test = labels(200), labels(80)
    split = split_of(RNG.permutation(200)[:30], 200)
    design = make_design(train, test, split, n_shadows=8, seed=1)
    check(design, train, test, split)
    assert design.inside_ST.sum(0).tolist() == [4] * 60
    assert (design.inside_ST[0] != design.inside_ST[1]).all()
    assert not (design.inside_ST[0] == design.inside_ST[2]).all()
    assert len(set(design.retained(0).tolist()) ^ set(design.retained(1).tolist())) > 0
    assert not len(design.fill_G)
    again = make_design(train, test, split, n_shadows=8, seed=1)
    assert torch.equal(again.retained(5), design.retained(5))


def test_fewer_test_rows_than_rows_to_forget():
    train, test = labels(200), labels(24)
    split = split_of(RNG.permutation(200)[:60], 200)
    design = make_design(train, test, split, n_shadows=4, seed=0)
    check(design, train, test, split)
    assert len(design.targets_T) == 48
    assert len(design.fill_G) == 60 - 24


def test_a_whole_class_is_forgotten_by_every_shadow_and_retained_by_none():
    train, test = labels(90), labels(120)
    split = split_of(np.flatnonzero(train.numpy() == 1), 90)
    design = make_design(train, test, split, n_shadows=4, seed=0)
    check(design, train, test, split)
    pool = torch.cat([train, test])
    assert 1 not in pool[design.others_O].tolist()


def test_a_test_set_of_other_classes_leaves_no_targets():
    train, test = labels(90), labels(30) + 3
    design = make_design(train, test, split_of(np.arange(9), 90), n_shadows=4, seed=0)
    assert len(design.targets_T) == len(design.member_T) == 0
    assert design.inside_ST.shape == (4, 0)


@pytest.mark.parametrize("n_shadows", [8, 9])
def test_the_run_itself_is_one_more_draw(n_shadows):
    """Members are as often inside as others are, so that a shadow says nothing about which half is the run's own."""
    train, test = labels(120), labels(120)
    split = split_of(np.arange(40), 120)
    designs = [make_design(train, test, split, n_shadows=n_shadows, seed=seed) for seed in range(40)]
    share = np.mean([design.inside_ST[:, design.member_T].mean() for design in designs])
    assert share == pytest.approx(0.5, abs=0.03)
