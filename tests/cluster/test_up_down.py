from __future__ import annotations

import pytest
from conftest import *
