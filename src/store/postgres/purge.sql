-- Deletes due records whose expiry lies at least the grace ($1, microseconds) back, and moves those that live longer.
-- Locked rows are somebody's business: they are skipped. The expiry is judged under the lock, so a row that was renewed or
-- reserved meanwhile stays.
WITH due AS MATERIALIZED (
    SELECT
        r.ctid AS address,
        c.edge,
        r.expires_at <= c.edge AS expired
    FROM
        (SELECT clock_timestamp() - $1 * interval '1 microsecond' AS edge) AS c
        CROSS JOIN LATERAL (
            SELECT
                ctid,
                expires_at
            FROM onceward_record
            WHERE purge_after <= c.edge
            ORDER BY purge_after
            LIMIT $2
            FOR UPDATE SKIP LOCKED
        ) AS r
),
deleted AS (
    DELETE FROM onceward_record AS r
    USING due
    WHERE
        r.ctid = due.address
        AND due.expired
    RETURNING 1
),
postponed AS (
    UPDATE onceward_record AS r
    SET purge_after = coalesce(r.expires_at, clock_timestamp() + r.retention * interval '1 microsecond')
    FROM due
    WHERE
        r.ctid = due.address
        AND due.expired IS NOT TRUE
    RETURNING 1
)
SELECT
    (SELECT count(*) FROM deleted) AS deleted,
    (SELECT count(*) FROM postponed) AS postponed
