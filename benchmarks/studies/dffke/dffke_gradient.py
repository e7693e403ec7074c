"""How strongly a peer corrects a client that is confidently wrong, by the direction of the KL.

python benchmarks/studies/dffke/dffke_gradient.py

Two classes. The student's logits favour the wrong class by a margin m; the teacher is sure of the other one by a
margin M = 8. The norm of the gradient with respect to the student's logits, of KL[student || teacher] (Eqs. 13-14) and
of KL[teacher || student] (Eq. 8).
"""

from __future__ import annotations

import torch

from fedaudit.methods.distillation.fke import student_first, teacher_first


def gradients(m: float, M: float) -> tuple[float, float]:
    norms = []
    for loss in (student_first, teacher_first):
        logits = torch.tensor([[m, 0.0]], dtype=torch.float64, requires_grad=True)
        teacher = torch.tensor([[[0.0, M]]], dtype=torch.float64)
        loss(lambda x: x, logits, teacher).sum().backward()
        assert logits.grad is not None
        norms.append(float(logits.grad.norm()))
    return norms[0], norms[1]


if __name__ == "__main__":
    print("margin  student-first  teacher-first")
    for m in (0.0, 2.0, 4.0, 8.0, 12.0):
        student, teacher = gradients(m, 8.0)
        print(f"{m:6.0f}  {student:13.4f}  {teacher:13.4f}")
