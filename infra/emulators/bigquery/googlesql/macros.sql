-- GoogleSQL functions whose results differ from DuckDB's function of the same name.
-- Loaded into the schema "bq" at start; rewrite.py and moments.py write the calls.
-- Arguments have no declared types, as DuckDB can't choose an overload for an aggregate; where a cast depends on
-- the type it asks typeof() and goes through text, so that every branch can be bound.
-- A shift is the number of days that moves the wanted first day of a week onto DuckDB's Monday.

CREATE OR REPLACE MACRO bq.divide(a, b) AS CASE WHEN b = 0 THEN error('division by zero') ELSE a / b END;

CREATE OR REPLACE MACRO bq.safe_divide(a, b) AS CASE WHEN b = 0 THEN NULL ELSE a / b END;

CREATE OR REPLACE MACRO bq.div(a, b) AS
    CASE WHEN b = 0 THEN error('division by zero') ELSE CAST(a AS BIGINT) // CAST(b AS BIGINT) END;

CREATE OR REPLACE MACRO bq.mod(a, b) AS CASE WHEN b = 0 THEN error('division by zero') ELSE a % b END;

CREATE OR REPLACE MACRO bq.float_text(v) AS CASE
    WHEN isnan(v) THEN 'NaN'
    WHEN isinf(v) THEN CASE WHEN v > 0 THEN 'inf' ELSE '-inf' END
    ELSE regexp_replace(CAST(v AS VARCHAR), '\.0$', '') END;

CREATE OR REPLACE MACRO bq.string(v) AS CASE
    WHEN typeof(v) IN ('DOUBLE', 'FLOAT') THEN bq.float_text(TRY_CAST(CAST(v AS VARCHAR) AS DOUBLE))
    WHEN typeof(v) LIKE 'DECIMAL%' AND contains(CAST(v AS VARCHAR), '.')
      THEN regexp_replace(CAST(v AS VARCHAR), '\.?0+$', '')
    WHEN typeof(v) = 'BLOB' THEN decode(CAST(CAST(v AS VARCHAR) AS BLOB))
    ELSE CAST(v AS VARCHAR) END;

CREATE OR REPLACE MACRO bq.safe_int64(v) AS CASE
    WHEN typeof(v) = 'BOOLEAN' THEN CASE CAST(v AS VARCHAR) WHEN 'true' THEN 1 WHEN 'false' THEN 0 END
    WHEN typeof(v) IN ('DOUBLE', 'FLOAT')
      THEN TRY_CAST(round(TRY_CAST(CAST(v AS VARCHAR) AS DOUBLE)) AS BIGINT)
    WHEN typeof(v) LIKE 'DECIMAL%'
      THEN TRY_CAST(round(TRY_CAST(CAST(v AS VARCHAR) AS DECIMAL(38, 9)), 0) AS BIGINT)
    WHEN regexp_full_match(CAST(v AS VARCHAR), '\s*[-+]?[0-9]+\s*') THEN TRY_CAST(CAST(v AS VARCHAR) AS BIGINT)
    END;

CREATE OR REPLACE MACRO bq.int64(v) AS CASE
    WHEN v IS NOT NULL AND bq.safe_int64(v) IS NULL THEN error('Bad int64 value: ' || CAST(v AS VARCHAR))
    ELSE bq.safe_int64(v) END;

CREATE OR REPLACE MACRO bq.safe_bool(v) AS CASE
    WHEN typeof(v) IN ('VARCHAR', 'BOOLEAN')
      THEN CASE lower(CAST(v AS VARCHAR)) WHEN 'true' THEN true WHEN 'false' THEN false END
    ELSE TRY_CAST(CAST(v AS VARCHAR) AS BIGINT) <> 0 END;

CREATE OR REPLACE MACRO bq.bool(v) AS CASE
    WHEN v IS NOT NULL AND bq.safe_bool(v) IS NULL THEN error('Bad bool value: ' || CAST(v AS VARCHAR))
    ELSE bq.safe_bool(v) END;

CREATE OR REPLACE MACRO bq.bytes(v) AS CASE
    WHEN typeof(v) = 'BLOB' THEN CAST(CAST(v AS VARCHAR) AS BLOB)
    ELSE encode(CAST(v AS VARCHAR)) END;

-- BigQuery gives a STRING for a STRING; one function here has one type.
CREATE OR REPLACE MACRO bq.json_query(v, path) AS CASE
    WHEN typeof(v) IN ('JSON', '"NULL"') THEN json_extract(v, path)
    ELSE error('JSON_QUERY of a STRING is not supported by the embedded BigQuery: wrap it in PARSE_JSON') END;

CREATE OR REPLACE MACRO bq.at(list, position) AS CASE
    WHEN position < 1 OR position > len(list)
      THEN error('Array index ' || (position - 1) || ' is out of bounds')
    ELSE list_extract(list, position) END;

CREATE OR REPLACE MACRO bq.safe_at(list, position) AS
    CASE WHEN position >= 1 THEN list_extract(list, position) END;

CREATE OR REPLACE MACRO bq.substr(v, position) AS
    CASE WHEN position < 0 THEN substring(v, greatest(len(v) + position + 1, 1))
      ELSE substring(v, greatest(position, 1)) END,
  (v, position, size) AS CASE
    WHEN size < 0 THEN error('Third argument in SUBSTR() cannot be negative')
    WHEN position < 0 THEN substring(v, greatest(len(v) + position + 1, 1), size)
    ELSE substring(v, greatest(position, 1), size) END;

-- DuckDB's date_trunc and + of a DATE give a TIMESTAMP; other types must not be cut to a DATE unseen.
CREATE OR REPLACE MACRO bq.date_only(v) AS CASE
    WHEN typeof(v) IN ('DATE', '"NULL"') THEN CAST(v AS DATE)
    ELSE error('No matching signature for a DATE function with an argument of type ' || typeof(v)
      || '; use the TIMESTAMP or DATETIME function') END;

CREATE OR REPLACE MACRO bq.trunc_date(unit, v, shift) AS
    CAST(date_trunc(unit, bq.date_only(v) + to_days(shift)) - to_days(shift) AS DATE);

CREATE OR REPLACE MACRO bq.trunc_moment(unit, v, shift) AS date_trunc(unit, v + to_days(shift)) - to_days(shift);

CREATE OR REPLACE MACRO bq.trunc_at(unit, v, shift, zone) AS
    timezone(zone, date_trunc(unit, timezone(zone, CAST(v AS TIMESTAMPTZ)) + to_days(shift)) - to_days(shift));

CREATE OR REPLACE MACRO bq.date_plus(v, span) AS CAST(bq.date_only(v) + span AS DATE);

CREATE OR REPLACE MACRO bq.date_minus(v, span) AS CAST(bq.date_only(v) - span AS DATE);

-- DATE_DIFF and DATETIME_DIFF count the boundaries between two moments, TIMESTAMP_DIFF the whole units.
-- Cut to the unit first, as DuckDB counts whole weeks.
CREATE OR REPLACE MACRO bq.date_diff(unit, later, earlier, shift) AS
    date_diff(unit, date_trunc(unit, earlier + to_days(shift)), date_trunc(unit, later + to_days(shift)));

CREATE OR REPLACE MACRO bq.timestamp_diff(unit_us, later, earlier) AS
    (epoch_us(later) - epoch_us(earlier)) // unit_us;

CREATE OR REPLACE MACRO bq.from_micros(v) AS CAST(make_timestamp(CAST(v AS BIGINT)) AS TIMESTAMPTZ);

-- Rounded down, before 1970 too.
CREATE OR REPLACE MACRO bq.unix(v, unit_us) AS
    CAST((epoch_us(v) - ((epoch_us(v) % unit_us) + unit_us) % unit_us) // unit_us AS BIGINT);
