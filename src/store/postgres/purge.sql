-- Of the first $3 records that are due after $2 (microseconds of the epoch), deletes those that expired at least $1
-- microseconds ago. Tells how many there were, how many are deleted, and where the next call goes on: so no call walks again
-- over what another has passed. Locked rows are somebody's business: they are skipped. The expiry is judged again under the
-- lock, so a row that was renewed or reserved meanwhile stays; rows that live longer are not locked at all.
WITH due AS MATERIALIZED (
    SELECT
        r.ctid AS address,
        r.purge_after,
        r.expires_at,
        c.edge
    FROM
        (SELECT clock_timestamp() - $1 * interval '1 microsecond' AS edge) AS c
        CROSS JOIN LATERAL (
            SELECT
                ctid,
                purge_after,
                expires_at
            FROM onceward_record
            WHERE
                purge_after > timestamptz 'epoch' + $2 * interval '1 microsecond'
                AND purge_after <= c.edge
            ORDER BY purge_after
            LIMIT $3
        ) AS r
),
expired AS MATERIALIZED (
    SELECT r.ctid AS address
    FROM
        due
        JOIN onceward_record AS r ON r.ctid = due.address
    WHERE
        due.expires_at <= due.edge
        AND r.expires_at <= due.edge
    FOR UPDATE OF r SKIP LOCKED
),
deleted AS (
    DELETE FROM onceward_record AS r
    USING expired
    WHERE r.ctid = expired.address
    RETURNING 1
)
SELECT
    (SELECT count(*) FROM due) AS met,
    (SELECT count(*) FROM deleted) AS deleted,
    (SELECT max(purge_after) FROM due) AS last
