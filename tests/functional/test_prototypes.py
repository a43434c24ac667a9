"""Prototypes against loops over classes and images."""

import torch

from fedsim.functional.prototypes import class_means, image_distance, prototype_distance


def drawn(seed=0, images=9, classes=5, width=3):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(images, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes - 1, (images,), generator=generator)  # the last class has no image
    prototypes = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    return features, labels, prototypes, torch.tensor([True, False, True, True, True])


def test_means_of_classes():
    features, labels, prototypes, _ = drawn()
    means, counts = class_means(features, labels, len(prototypes))
    for j in range(len(prototypes)):
        members = [feature for feature, label in zip(features, labels.tolist(), strict=True) if label == j]
        assert counts[j] == len(members)
        expected = sum(members) / len(members) if members else torch.zeros(3, dtype=torch.float64)
        torch.testing.assert_close(means[j], expected)


def test_distances_of_prototypes_and_of_images():
    features, labels, prototypes, counted = drawn(1)
    means, counts = class_means(features, labels, len(prototypes))
    chosen = counted & (counts > 0)
    expected = sum(((means[j] - prototypes[j]) ** 2).sum().sqrt() for j in range(len(prototypes)) if chosen[j])
    torch.testing.assert_close(prototype_distance(means, prototypes, chosen), expected)
    squares = [
        ((feature - prototypes[label]) ** 2).sum() * counted[label]
        for feature, label in zip(features, labels.tolist(), strict=True)
    ]
    found = image_distance(features, prototypes[labels], counted[labels])
    torch.testing.assert_close(found, sum(squares) / features.numel())


def test_equal_prototypes_have_no_gradient_and_others_that_of_the_norm():
    means = torch.tensor([[1.0, 2.0], [3.0, 0.0]], requires_grad=True)
    prototypes = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    prototype_distance(means, prototypes, torch.tensor([True, True])).backward()
    torch.testing.assert_close(means.grad, torch.tensor([[0.0, 0.0], [0.6, -0.8]]))
