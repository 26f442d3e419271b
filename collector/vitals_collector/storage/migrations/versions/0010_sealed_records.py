"""Sealed records: events, findings, decisions and a run's attributes begin with their checksum."""

import zlib

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_BODIES = (
    ("runs", ("run_id",), "info"),
    ("events", ("id",), "body"),
    ("findings", ("run_id", "incarnation", "seq"), "body"),
    ("decisions", ("run_id", "incarnation", "seq"), "body"),
)
_AT_ONCE = 1_000


def upgrade() -> None:
    """Put the checksum before each body; an empty one stays empty."""
    connection = op.get_bind()
    for name, keys, body in _BODIES:
        table = sa.table(name, *(sa.column(key) for key in keys), sa.column(body, sa.LargeBinary))
        own = [table.c[key] for key in keys]
        change = (
            sa.update(table)
            .where(*(column == sa.bindparam(f"of_{column.name}") for column in own))
            .values({body: sa.bindparam("sealed", type_=sa.LargeBinary)})
        )
        stored_keys = connection.execute(
            sa.select(*own).where(sa.func.length(table.c[body]) > 0)
        ).all()
        for i in range(0, len(stored_keys), _AT_ONCE):
            rows = []
            for key in stored_keys[i : i + _AT_ONCE]:
                of = dict(zip(keys, key, strict=True))
                query = sa.select(table.c[body]).where(*(table.c[k] == v for k, v in of.items()))
                raw = bytes(connection.execute(query).scalar_one())
                sealed = zlib.crc32(raw).to_bytes(4, "big") + raw
                rows.append({f"of_{k}": v for k, v in of.items()} | {"sealed": sealed})
            connection.execute(change, rows)
