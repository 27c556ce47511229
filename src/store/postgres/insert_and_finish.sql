-- New records, and the end of the reservations of others: insert.sql and finish.sql as one statement and one commit.
WITH
    inserted AS (
        {insert}
    ),
    finished AS (
        {finish}
    )
SELECT
    id,
    now,
    fence,
    version,
    lock_ttl,
    locked_until,
    expires_at
FROM inserted
UNION ALL
SELECT
    id,
    now,
    fence,
    version,
    lock_ttl,
    locked_until,
    expires_at
FROM finished
